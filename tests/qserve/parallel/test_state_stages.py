"""Pipeline stages of models with states: tokens are one rank's."""

import json

import pytest

from formats.errors import InputError
from qserve.engine.distributed import executors
from qserve.engine.kv_cache import state_snapshots
from qserve.engine.runner import microbatches
from tests.conftest import make_tiny
from tests.qserve.model.test_hybrid_prefixes import EVICTED, MODES, chats, make_engine
from tests.qserve.parallel.rank_of_small_parts import MIN_TOKENS
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp
from tests.tiny_families import TINY_FAMILIES

exhaustive = pytest.mark.exhaustive
MODES = {**MODES, "evicted": EVICTED}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Copies of a few tokens are worth while, and a step is computed in parts of a few tokens."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)
    monkeypatch.setattr(microbatches, "MIN_TOKENS", MIN_TOKENS)
    monkeypatch.setattr(executors, "MODULE", "tests.qserve.parallel.rank_of_small_parts")


def longer(family, times=2):
    """Name and values of a family's config with each layer `times` times."""
    name, values = TINY_FAMILIES[family]
    values = dict(values)
    for key in ("layer_types", "mlp_layer_types"):
        if key in values:
            values[key] = values[key] * times
    values["num_hidden_layers"] = values.get("num_hidden_layers", 3) * times
    return name, values


@pytest.mark.parametrize(
    ("family", "mode", "tensor", "stages"),
    [
        ("qwen3_5", "chunked", 1, 2),
        *(
            pytest.param(*each, marks=exhaustive)
            for each in [
                ("qwen3_next", "pushed out", 1, 2),
                ("qwen3_next", "evicted", 2, 2),
                ("qwen3_5_moe", "few copies", 1, 2),
                ("granite_hybrid", "whole", 1, 2),
                ("lfm2", "chunked", 1, 2),
                ("falcon_h1", "pushed out", 1, 3),
                ("kimi_linear", "evicted", 1, 2),
            ]
        ),
    ],
)
def test_tokens_of_stages_equal_one_rank(family, mode, tensor, stages, tmp_path):
    """In parts of chunks, preempted, from copies of states, also from those of the host."""
    folder = make_tiny(tmp_path / "model", *longer(family))
    want, *_ = chats(make_engine(folder, num_state_snapshots=0))
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    engine = make_engine(folder, 1, **ranks, **MODES[mode])
    try:
        found, num_preempted, num_cached = chats(engine)
        assert found == want
        assert bool(num_preempted) == (mode == "pushed out")
        assert num_cached > (0 if mode == "few copies" else 100)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "mode", "drafts", "tensor", "stages"),
    [
        ("qwen3_5", "whole", MTP, 1, 2),
        *(
            pytest.param(*each, marks=exhaustive)
            for each in [
                ("qwen3_5", "chunked", NGRAM, 1, 2),
                ("qwen3_next", "evicted", MTP, 1, 2),
                ("qwen3_next", "pushed out", MTP, 2, 2),
                ("granite_hybrid", "pushed out", NGRAM, 1, 2),
                ("falcon_h1", "chunked", NGRAM, 1, 3),
            ]
        ),
    ],
)
def test_drafts_on_stages(family, mode, drafts, tensor, stages, tmp_path, monkeypatch):
    """A verification is one part, and a part of a prompt may be as short as one."""
    monkeypatch.setitem(TINY_FAMILIES, family, longer(family))
    if drafts is MTP:
        folder = make_hybrid_mtp(tmp_path / "model", family, 0.5)
    else:
        folder = make_tiny(tmp_path / "model", *TINY_FAMILIES[family])
    want, *_ = chats(make_engine(folder, num_state_snapshots=0))
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    settings = {"speculative_config": json.dumps(drafts), **ranks, **MODES[mode]}
    engine = make_engine(folder, 1, **settings)
    verified = []
    engine.scheduler.speculation.observe = lambda *counts: verified.append(counts)
    try:
        assert chats(engine)[0] == want
        # ngram drafts for random tokens are rarely right
        assert any(accepted for _, accepted in verified) or drafts is NGRAM
        assert any(accepted < drafted for drafted, accepted in verified)
    finally:
        engine.close()


def test_stage_without_states_or_attention_is_refused(tiny_model):
    for stages, words in ((2, "stage 1, 0 to 0, has attention"), (3, "has attention")):
        with pytest.raises(InputError, match=f"--pipeline-parallel-size {stages}.*{words}"):
            make_engine(tiny_model("qwen3_5"), pipeline_parallel_size=stages)
