"""Reports of drafts: on the metrics page, and to clients in their usage."""

import json

import pytest

pytest.importorskip("prometheus_client")  # a machine that only computes has no server

from qserve.engine.report import EngineReport
from qserve.engine.token_event import RequestFacts
from qserve.params.sampling_params import SamplingParams
from qserve.server.observability.metrics import Metrics
from qserve.server.openai.replies import usage
from tests.qserve.speculation.traces import make_engine, make_requests


def test_counter_names_equal_vllm():
    metrics = Metrics("m")
    for _ in range(2):
        metrics.take_report(EngineReport(drafts=(3, 9, 3, 2, 0)))
    metrics.take_report(EngineReport(drafts=(0, 0, 0, 0, 0)))
    page = metrics.page().decode()
    for line in (
        'spec_decode_num_drafts_total{model_name="m"} 6.0',
        'spec_decode_num_draft_tokens_total{model_name="m"} 18.0',
        'spec_decode_num_accepted_tokens_total{model_name="m"} 10.0',
        'spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 4.0',
    ):
        assert f"qserve:{line}\n" in page


def test_usage_counts_the_drafts_of_all_choices():
    facts = [RequestFacts(num_accepted=a, num_rejected=r) for a, r in ((4, 2), (1, 5))]
    found = usage(7, 20, 0, facts)["completion_tokens_details"]
    assert found == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 7}
    assert "completion_tokens_details" not in usage(7, 20, 0, [RequestFacts()])


def test_requests_and_the_engine_count_the_same(docs_5m):
    config = {"method": "draft_model", "model": str(docs_5m), "num_speculative_tokens": 3}
    engine = make_engine(docs_5m, speculative_config=json.dumps(config))
    for request in make_requests(2, 4, ("greedy", "sampled", "hot")):
        engine.add_request(*request)
    last, totals = {}, [0] * 5
    while engine.has_work():
        last |= {event.request_id: event for event in engine.step()}
        totals = [a + b for a, b in zip(totals, engine.report().drafts, strict=True)]
    verifies, drafts, *accepted = totals
    assert verifies > 0
    counts = [(event.facts.num_accepted, event.facts.num_rejected) for event in last.values()]
    assert sum(map(sum, counts)) == drafts
    # drafts accepted after a request's end are no output
    assert 0 < sum(each for each, _ in counts) <= sum(accepted)


@pytest.mark.parametrize("end", ["max_tokens", "stop_token_ids"])
def test_drafts_after_end_token_are_not_output(docs_5m, end):
    """The drafter is the model: all drafts are accepted, and most of the first verify is cut."""
    config = {"method": "draft_model", "model": str(docs_5m), "num_speculative_tokens": 5}
    config |= {"adaptive": False}
    engine = make_engine(docs_5m, speculative_config=json.dumps(config), block_size=16)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompt, found = list(range(300, 333)), []  # pages have places for all drafts
    for name in ("all", "cut"):
        engine.add_request(name, prompt, params)
        events = []
        while engine.has_work():
            events += engine.step()
        tokens = [token for event in events for token in event.token_ids]
        found.append((tokens, events[-1].facts.num_accepted, events[-1].facts.num_rejected))
        most = {"max_tokens": 3} if end == "max_tokens" else {"stop_token_ids": [tokens[2]]}
        params = SamplingParams(**{"temperature": 0, "max_tokens": 9, "ignore_eos": True} | most)
    tokens, accepted, rejected = found[1]
    assert tokens == found[0][0][:3]
    # the first token came of the prompt, and the two after it were drafts
    assert (accepted, rejected) == (2, 3)
