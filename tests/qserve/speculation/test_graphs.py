"""Decodes and verifies in graphs, with their padding and fixed places: the same tokens.

Where there is no CUDA what a graph holds runs eagerly, on the same places.
"""

import json
from dataclasses import replace

import pytest

from qserve.engine.cuda_graphs import StepGraphs
from qserve.speculation import drafter as drafters
from qserve.speculation.graphs import GraphedStep
from tests.qserve.speculation.drafters import ERRING
from tests.qserve.speculation.traces import make_engine, make_requests, run


@pytest.fixture
def replayed(monkeypatch):
    """Graphs that launch their work; the keys of the steps that went with drafts."""
    found = []

    def capture(graphs, key):
        graphs._buffers.pad_(key)
        batch = graphs._buffers.batch(key, graphs._max_context_len)
        graphs._batches[key] = batch
        graphs._graphs[key] = None, graphs._step(batch)

    def replay(graphs, key):
        graphs._graphs[key] = None, graphs._step(graphs._batches[key])
        return graphs._graphs[key][1]

    begin = GraphedStep.__init__

    def watched(step, graphs, key, entry, rows):
        found.append((key, rows))
        begin(step, graphs, key, entry, rows)

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    monkeypatch.setattr(StepGraphs, "replay", replay)
    monkeypatch.setattr(GraphedStep, "__init__", watched)
    return found


@pytest.mark.parametrize("steps_in_flight", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_the_same_tokens(docs_5m, replayed, steps_in_flight, monkeypatch):
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
