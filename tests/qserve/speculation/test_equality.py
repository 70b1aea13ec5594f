"""With speculation, requests give the same tokens as without, for any drafts and any events.

Float32 on the CPU, where a row's result does not depend on what else is in the step.
"""

import json

import pytest

from qserve.params.sampling_params import SamplingParams
from qserve.speculation import drafter as drafters
from tests.qserve.speculation.drafters import ERRING, Oracle
from tests.qserve.speculation.traces import make_engine, make_requests, run

MODES = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "oracle": {"method": "ngram"},
    "draft model": {"method": "draft_model"},
    "erring": {"method": "draft_model"},
}
EXHAUSTIVE = pytest.mark.exhaustive
# Few pages: requests lose theirs and compute them again.
FEW_PAGES = {"num_gpu_blocks_override": 34, "admission": "fits"}
SETTINGS = {
    "plain": {},
    "few pages": FEW_PAGES,
    "8-bit pages": {"kv_cache_dtype": "int8"},
    "prefill first": {"scheduling_policy": "prefill-first", **FEW_PAGES},
    "no cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 11},
    "host pages": {"kv_offload_gb": 0.001, **FEW_PAGES},
    "4-bit pages": {"kv_cache_dtype": "int4", **FEW_PAGES},
}


@pytest.fixture
def speculate(docs_5m, monkeypatch):
    def make(mode, answers, steps_in_flight=0, count=3, **settings):
        found = {"num_speculative_tokens": count} | MODES[mode]
        if found["method"] == "draft_model":
            found["model"] = str(docs_5m)
        if mode == "erring":
            monkeypatch.setitem(drafters.DEVICE_DRAFTERS, "draft_model", ERRING)
        if mode == "oracle":
            monkeypatch.setattr(
                "qserve.speculation.speculation.build_host_drafter",
                lambda config: Oracle(answers, 1, 1000),
            )
        config = json.dumps(found)
        return make_engine(docs_5m, steps_in_flight, speculative_config=config, **settings)

    return make


def answers_of(requests, found):
    return {name: prompt + found[name][0] for name, prompt, _ in requests}


def compare(
    docs_5m, speculate, mode, requests, seed, steps_in_flight, count=3, aborted=(), **settings
):
    """Returns the verifies, the drafts, and the accepted drafts at each position.

    The tokens of aborted requests must be a prefix of the expected ones.
    """
    numeric = {name: settings[name] for name in ("kv_cache_dtype",) if name in settings}
    want = run(make_engine(docs_5m, **numeric), requests, seed)
    answers = answers_of(requests, want)
    engine = speculate(mode, answers, steps_in_flight, count, **settings)
    found = run(engine, requests, seed + 1, aborted)
    for name in aborted:
        tokens, _, _ = found.pop(name)
        assert tokens == want.pop(name)[0][: len(tokens)]
    assert found == want
    return engine.scheduler.speculation.take_counts()


@pytest.mark.parametrize(
    "mode", [m if m in ("oracle", "erring") else pytest.param(m, marks=EXHAUSTIVE) for m in MODES]
)
def test_all_kinds_of_requests(docs_5m, speculate, mode):
    requests = make_requests(5, 15)
    in_flight = mode in ("erring", "oracle")
    verifies, drafts, *accepted = compare(docs_5m, speculate, mode, requests, 5, in_flight)
    assert verifies > 5 and drafts >= verifies and accepted[0] > 0
    if mode in ("erring", "oracle"):
        assert accepted[0] < verifies
    assert accepted == sorted(accepted, reverse=True)


# Each setting meets each drafter once; all counts meet both.
TRACES = [
    (mode, setting, (1, 2, 5)[(i + j) % 3], (i + j // 3) % 2)
    for i, mode in enumerate(MODES)
    for j, setting in enumerate(SETTINGS)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mode", "setting", "count", "steps_in_flight"), TRACES)
def test_random_traces(docs_5m, speculate, mode, setting, count, steps_in_flight):
    seed = len(mode) + len(setting)
    requests = make_requests(seed, 13)
    compare(
        *(docs_5m, speculate, mode, requests, seed, steps_in_flight, count),
        aborted=[name for name, _, _ in requests[seed % 7 :: 7]],
        **SETTINGS[setting],
    )


def test_penalties_do_not_count_rejected_drafts(docs_5m, speculate):
    """The table of counts keeps nothing of the rows after a rejected draft."""
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, frequency_penalty=1.5, presence_penalty=1.0
    )
    requests = [(str(n), list(range(300 + n, 330 + 2 * n)), params) for n in range(5)]
    verifies, _, *accepted = compare(docs_5m, speculate, "oracle", requests, 0, 0, count=6)
    assert 0 < accepted[3] < verifies
