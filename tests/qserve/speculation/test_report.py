"""What is told of drafts: to the page of metrics, and to clients in their usage."""

import json

import pytest

pytest.importorskip("prometheus_client")  # a machine that only computes has no server

from qserve.engine.report import EngineReport
from qserve.server.metrics import Metrics
from qserve.server.replies import usage
from tests.qserve.speculation.traces import make_engine, make_requests


def test_counters_have_vllms_names():
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
    found = usage(7, 20, 0, [(4, 2), (1, 5)])["completion_tokens_details"]
    assert found == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 7}
    assert "completion_tokens_details" not in usage(7, 20, 0, [(0, 0)])


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
    assert sum(event.num_accepted for event in last.values()) == sum(accepted)
    assert sum(event.num_rejected for event in last.values()) == drafts - sum(accepted)
