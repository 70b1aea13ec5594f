"""Ranks that divide models with states: logits and tokens are one rank's."""

import json

import pytest
import torch

from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from qserve.engine.kv_cache import state_snapshots
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import check_ranks
from tests.conftest import make_tiny
from tests.qserve.model.test_hybrid_prefixes import MODES, chats, make_engine
from tests.qserve.model.test_variants import reorder
from tests.qserve.model.variants import edited
from tests.qserve.parallel.test_sharing import assert_sharded
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp
from tests.tiny_families import STATES, TINY_FAMILIES

exhaustive = pytest.mark.exhaustive
FEW = [("qwen3_5", 4), ("lfm2", 4), ("granite_hybrid", 4), ("minimax", 2)]
SHARDED = [family for family in STATES if family != "inkling"]  # refused (test_inkling.py)
REST = [(family, size) for family in SHARDED for size in (2, 4) if (family, size) not in FEW]


@pytest.mark.parametrize(
    ("family", "size"), [*FEW, *(pytest.param(*each, marks=exhaustive) for each in REST)]
)
def test_four_bits(family, size, written):
    """Heads of 24 and channels of 16 end inside of groups of 32 inputs; four ranks divide two
    groups of Mamba-2, and two key heads."""
    layout = "gptq" if family in ("granite_hybrid", "falcon_h1", "lfm2") else "compressed-tensors"
    assert_sharded(written("w4a16-sym-g32", layout, family), size)


def test_state_shards_hold_own_heads(tiny_model):
    """Specs of states, too: a rank's slots hold its heads alone."""
    decoders = assert_sharded(tiny_model("qwen3_next"), 2)
    nets = [decoder.layers[0].attention for decoder in decoders]
    assert [(net.shape.key_heads, net.shape.value_heads) for net in nets] == [(1, 2), (1, 2)]
    specs = [net.cache_spec(None, 16) for net in nets]
    assert all(spec.memory == (2, 16, 24) and spec.channels == 2 * 16 + 48 for spec in specs)


def test_separate_convolutions_are_sharded(tiny_model):
    """Queries, keys and values of OLMo-Hybrid, whose norms of attention are one for all heads."""
    decoders = assert_sharded(tiny_model("olmo_hybrid"), 2)
    nets = [decoder.layers[0].attention for decoder in decoders]
    assert [net.conv_weight.shape[0] for net in nets] == [2 * 16 + 48] * 2
    assert not torch.equal(nets[0].conv_weight, nets[1].conv_weight)
    assert all(net.write_factor == 2 for net in nets)


def test_kda_and_lightning_heads_are_sharded(tiny_model):
    """Kimi delta attention and lightning attention; four ranks have two heads, or one."""
    decoders = assert_sharded(tiny_model("kimi_linear"), 4)
    mixers = [decoder.layers[0].attention for decoder in decoders]
    assert [mixer.shape.heads for mixer in mixers] == [2, 2, 1, 1]
    assert [mixer.cache_spec(None, 16).memory[0] for mixer in mixers] == [2, 2, 1, 1]
    decoders = assert_sharded(tiny_model("ling_3"), 2)
    assert [decoder.layers[0].attention.dt_bias.shape for decoder in decoders] == [(64,)] * 2
    assert [decoder.layers[1].attention.gates.weight.shape for decoder in decoders] == [(2, 64)] * 2
    decoders = assert_sharded(tiny_model("minimax"), 2)
    mixers = [decoder.layers[0].attention for decoder in decoders]
    assert [mixer.cache_spec(None, 16).memory for mixer in mixers] == [(2, 32, 32)] * 2
    assert not torch.equal(mixers[0].a_log, mixers[1].a_log)


@pytest.mark.parametrize("first", [False, True])
def test_grouped_norm_over_ranks_before_or_after_gate(tmp_path, first):
    """One group of Mamba-2: all ranks together norm it."""
    name, values = TINY_FAMILIES["falcon_h1"]
    values = {**values, "mamba_n_groups": 1, "mamba_norm_before_gate": first}
    decoders = assert_sharded(make_tiny(tmp_path / "one", name, values), 2)
    mixer = decoders[0].layers[0].attention.mamba
    assert mixer.norm_over_ranks is not None and mixer.norm_first == first


@pytest.mark.parametrize(
    ("family", "name"),
    [("lfm2", "conv.out_proj"), ("lfm2", "conv.in_proj"), ("granite_hybrid", "mamba.out_proj")],
)
def test_act_order(family, name, written, tmp_path):
    """Ranks gather inputs that they read in another order than they compute them."""
    folder = edited(
        written("w4a16-sym-g32", "gptq", family),
        tmp_path / "x",
        lambda state: reorder(state, f"model.layers.0.{name}"),
        config=lambda c: c[BLOCK].update(desc_act=True),
    )
    decoders = assert_sharded(folder, 2)
    assert (decoders[0].layers[0].attention.out_proj.order is None) == name.endswith("in_proj")


def test_latent_bias_is_added_once(tmp_path):
    name, values = TINY_FAMILIES["nemotron_h_latent"]
    biased = {**values, "mlp_bias": True}
    state_of = edited(
        make_tiny(tmp_path / "latent", name, biased),
        tmp_path / "biased",
        lambda state: [value.add_(0.5) for name, value in state.items() if name.endswith("bias")],
    )
    assert_sharded(state_of, 2)


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("qwen3_5", {"linear_num_value_heads": 2}, "2 value heads of 2 key heads cannot"),
        ("granite_hybrid", {"mamba_n_groups": 8}, "8 Mamba-2 heads of 8 groups cannot"),
        (
            "kimi_linear",
            {"num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_heads": 3},
            "3 heads of Kimi delta attention of 3 key heads cannot",
        ),
    ],
)
def test_indivisible_sizes_are_refused(tmp_path, family, changed, message):
    name, values = TINY_FAMILIES[family]
    enough = {"num_attention_heads": 12, "num_key_value_heads": 12}
    if family == "granite_hybrid":
        enough |= {"hidden_size": 96, "mamba_d_head": 24}
    folder = make_tiny(tmp_path / "x", name, {**values, **enough, **changed})
    size = 12 if family == "granite_hybrid" else 4
    with pytest.raises(InputError, match=f"--tensor-parallel-size {size}: {message}"):
        check_ranks(ModelConfig.from_folder(folder), size, 1)
    if size == 4:
        assert message in inspect_checkpoint(folder).parallel[size]
        assert not inspect_checkpoint(folder).parallel[2]


@pytest.fixture
def small(monkeypatch):
    """Copies of a few tokens are worth while."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)


MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}


@pytest.mark.parametrize(
    ("family", "mode", "size", "drafts"),
    [
        ("qwen3_5", "pushed out", 2, True),
        *(
            pytest.param(*each, marks=exhaustive)
            for each in [
                ("qwen3_next", "chunked", 2, True),
                ("qwen3_5_moe", "few copies", 4, True),
                ("granite_hybrid", "pushed out", 2, False),
                ("lfm2", "chunked", 2, False),
                ("falcon_h1", "few copies", 2, False),
                ("nemotron_h_moe", "pushed out", 4, False),
                ("kimi_linear", "chunked", 2, False),
                ("ling_3", "pushed out", 2, False),
                ("minimax", "pushed out", 2, False),
                ("olmo_hybrid", "pushed out", 2, False),
                ("qwen3_next", "pushed out", 4, False),
            ]
        ),
    ],
)
def test_sharded_state_tokens_equal_one_rank(
    family, mode, size, drafts, small, tiny_model, tmp_path
):
    """In chunks, preempted, from copies of states; with drafts of the sharded MTP layer."""
    folder = make_hybrid_mtp(tmp_path / "mtp", family, 0.5) if drafts else tiny_model(family)
    want, *_ = chats(make_engine(folder, num_state_snapshots=0))
    settings = {"speculative_config": json.dumps(MTP)} if drafts else {}
    engine = make_engine(folder, 1, tensor_parallel_size=size, **MODES[mode], **settings)
    verified = []
    if drafts:
        engine.scheduler.speculation.observe = lambda *counts: verified.append(counts)
    try:
        found, num_preempted, num_cached = chats(engine)
        assert found == want
        assert bool(num_preempted) == (mode == "pushed out")
        assert num_cached > (0 if mode == "few copies" else 100)
        if drafts:
            assert any(accepted for _, accepted in verified)
            assert any(accepted < drafts for drafts, accepted in verified)
    finally:
        engine.close()
