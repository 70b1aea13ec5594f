"""Decodes and verifies in graphs, with their padding and fixed places: the same tokens.

Where there is no CUDA what a graph holds runs eagerly, on the same places.
"""

import json
from dataclasses import replace

import pytest

from qserve.params.sampling_params import SamplingParams
from qserve.speculation import drafter as drafters
from qserve.speculation import graphs
from tests.qserve.speculation.docs_heads import CONFIGS, write_docs_head
from tests.qserve.speculation.drafters import ERRING
from tests.qserve.speculation.traces import make_engine, make_requests, run

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": None}


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps_in_flight", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_graph_steps_give_same_tokens(docs_5m, replayed, steps_in_flight, monkeypatch):
    monkeypatch.setitem(drafters.DEVICE_DRAFTERS, "draft_model", ERRING)
    kinds = ("greedy", "sampled", "penalties", "logprobs", "bias", "hot")
    requests = make_requests(3, 14, kinds)
    want = run(make_engine(docs_5m), requests)
    config = {"method": "draft_model", "model": str(docs_5m), "num_speculative_tokens": 3}
    engine = make_engine(docs_5m, steps_in_flight, speculative_config=json.dumps(config))
    engine.runner.capture_graphs(6, engine.max_model_len)
    assert run(engine, requests) == want
    for request in requests[6:9]:  # greedy, sampled, with penalties
        engine.add_request(request[0], request[1], replace(request[2], max_tokens=20))
    while engine.has_work():
        engine.step()
    verifies, drafts, *accepted = engine.scheduler.speculation.take_counts()
    assert 0 < accepted[2] < accepted[0] < verifies
    # padded ones as well
    assert any(len(rows.rows_R) < key.num_requests for key, rows in replayed if key.count == 4)


class EagerGraph:
    """A graph that launches its work."""

    def __init__(self, captured):
        self._captured = captured

    def replay(self):
        self._captured._result = self._captured._work()


@pytest.mark.exhaustive
def test_idle_captures_do_not_change_tokens(docs_5m, replayed, monkeypatch):
    """They run a step of nothing between requests that wait: tables and places are theirs."""
    made = []

    def capture(captured):
        assert captured._num_runs and captured._graph is None
        captured._graph = EagerGraph(captured)
        made.append(captured)

    monkeypatch.setattr(graphs.Captured, "capture", capture)
    monkeypatch.setitem(drafters.DEVICE_DRAFTERS, "draft_model", ERRING)
    requests = make_requests(5, 8, ("greedy", "sampled", "hot", "penalties"))
    want = run(make_engine(docs_5m), requests)
    config = {"method": "draft_model", "model": str(docs_5m), "num_speculative_tokens": 3}
    engine = make_engine(docs_5m, 1, speculative_config=json.dumps(config | {"adaptive": False}))
    runner = engine.runner
    runner.capture_graphs(6, engine.max_model_len)
    for request in requests:
        engine.add_request(*request)
    found = {name: [] for name, _, _ in requests}
    while engine.has_work():
        for event in engine.step():
            found[event.request_id] += event.token_ids
        # where a server would be idle; what is in flight here has been launched
        for _ in range(3):
            runner.capture_next()
    assert found == {name: tokens for name, (tokens, _, _) in want.items()}
    while runner.capture_next():
        pass
    assert not runner.can_capture_next
    keys = runner.graphs.decode_keys
    # for each, the graph that fills, and two after it: with filters and without
    assert len(keys) > 4 and len(made) == 3 * len(keys)


LENGTHS = {
    # 16 pages, as wide as a block table can be; drafts beyond would need a 17th
    "to the model's end": {"max_model_len": 64},
    # graphs end amid a text: a page beyond is there before a key of it is
    "graphs end before": {"max_model_len": 120, "max_seq_len_to_capture": 64},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "speculates"),
    [
        ("to the model's end", True),
        pytest.param("graphs end before", False, marks=pytest.mark.exhaustive),
        pytest.param("graphs end before", True, marks=pytest.mark.exhaustive),
    ],
)
def test_graphs_up_to_last_position(docs_5m, replayed, name, speculates):
    config = {"method": "draft_model", "model": str(docs_5m), "num_speculative_tokens": 3}
    settings = {"speculative_config": json.dumps(config)} if speculates else {}
    settings |= LENGTHS[name] | {"max_num_batched_tokens": 16}
    requests = [
        (f"{length}", list(range(300, 300 + length)), SamplingParams(**GREEDY))
        for length in (3, 30, 55, 62, 100)
        if length < LENGTHS[name]["max_model_len"]
    ]
    want = run(make_engine(docs_5m, max_model_len=LENGTHS[name]["max_model_len"]), requests)
    engine = make_engine(docs_5m, 1, **settings)
    engine.runner.capture_graphs(6, engine.max_model_len)
    # one by one: a step runs in no graph where one of its requests does not fit
    assert {name: found for each in requests for name, found in run(engine, [each]).items()} == want
    assert bool(replayed) == speculates  # those with drafts


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_single_pass_heads_in_graphs(docs_5m, replayed, kind, name, tmp_path):
    """Rows of a block up to the last position, where pages and places for them end."""
    head = {"model": str(write_docs_head(tmp_path, kind)), "num_speculative_tokens": 4}
    head["adaptive"] = False  # its drafts are refused
    settings = LENGTHS[name] | {"max_num_batched_tokens": 16}
    limit = LENGTHS[name]["max_model_len"]
    requests = [
        (f"{length}", list(range(300, 300 + length)), SamplingParams(**GREEDY))
        for length in (3, 30, 55, 62, 100)
        if length < limit
    ]
    want = run(make_engine(docs_5m, max_model_len=limit), requests)
    engine = make_engine(docs_5m, 1, speculative_config=json.dumps(head), **settings)
    engine.runner.capture_graphs(6, engine.max_model_len)
    assert run(engine, requests) == want
    assert {name: found for each in requests for name, found in run(engine, [each]).items()} == want
    assert any(key.count > 1 for key, _ in replayed)
