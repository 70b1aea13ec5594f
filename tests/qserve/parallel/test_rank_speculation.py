"""Speculation with pipeline stages: the requests of tests/qserve/speculation give equal tokens.

The drafter is on the first stage; verification results and the hidden states of other stages'
layers travel between them.
"""

import json

import pytest

from qserve.engine.distributed import executors
from qserve.engine.runner import microbatches
from qserve.speculation import drafter as drafters
from tests.qserve.parallel.rank_of_small_parts import MIN_TOKENS
from tests.qserve.speculation.drafters import ERRING
from tests.qserve.speculation.mtp_model import make_mtp
from tests.qserve.speculation.traces import make_engine, make_requests, run

exhaustive = pytest.mark.exhaustive
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "erring": {"method": "draft_model"},  # some of its drafts come to nothing
    "draft_model": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
}


def settings_of(method, folder):
    found = {"num_speculative_tokens": 3} | METHODS[method]
    if method not in ("ngram", "suffix"):
        found["model"] = (
            str(folder.parent / "docs-5m-eagle3") if method == "eagle3" else str(folder)
        )
    return {"speculative_config": json.dumps(found)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("method", "tensor", "stages", "steps_in_flight"),
    [
        ("erring", 1, 2, 1),
        *(
            pytest.param(*each, marks=exhaustive)
            for each in [
                ("ngram", 1, 2, 0),
                ("ngram", 2, 2, 1),
                ("suffix", 1, 3, 1),
                ("erring", 1, 2, 0),
                ("erring", 1, 4, 1),
                ("draft_model", 2, 2, 1),
                ("eagle3", 1, 2, 1),
                ("eagle3", 1, 4, 0),
                ("eagle3", 2, 2, 1),
            ]
        ),
    ],
)
def test_stages(method, tensor, stages, steps_in_flight, docs_5m, monkeypatch):
    """All kinds of requests: greedy, drawn, with penalties, with grammars. A step is computed in
    parts, which begin inside of a request's drafts, too.
    """
    monkeypatch.setattr(microbatches, "MIN_TOKENS", MIN_TOKENS)
    monkeypatch.setattr(executors, "MODULE", "tests.qserve.parallel.rank_of_small_parts")
    if method == "erring":
        monkeypatch.setitem(drafters.DEVICE_DRAFTERS, "draft_model", ERRING)
    requests = make_requests(5, 14)
    want = run(make_engine(docs_5m), requests, 5)
    engine = make_engine(
        docs_5m,
        steps_in_flight,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        **settings_of(method, docs_5m),
    )
    try:
        assert run(engine, requests, 6) == want
        verifies, drafts, *accepted = engine.scheduler.speculation.take_counts()
        assert drafts >= verifies > 5 and 0 < accepted[0] < drafts
    finally:
        engine.close()


@exhaustive
@pytest.mark.parametrize(
    ("tensor", "stages", "whole_experts"),
    [(2, 1, False), (1, 2, False), (2, 2, False), (2, 1, True)],
)
def test_mtp_layer_drafts_on_ranks(tensor, stages, whole_experts, docs_5m, tmp_path):
    """Sharded over ranks like the model's layers; with stages, the last one's state is sent."""
    folder = make_mtp(tmp_path / "often_right", docs_5m, agreement=0.7, vocab_size=8192)
    requests = make_requests(5, 10)
    want = run(make_engine(folder), requests, 5)
    settings = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    ranks["enable_expert_parallel"] = whole_experts
    engine = make_engine(folder, speculative_config=settings, **ranks)
    try:
        assert run(engine, requests, 6) == want
        verifies, drafts, *accepted = engine.scheduler.speculation.take_counts()
        assert drafts >= verifies > 5 and 0 < accepted[0] < drafts
    finally:
        engine.close()
