"""Ranks that divide models whose layers have different heads, and Gemma's inputs of layers."""

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.architecture.sizes import num_experts
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import check_ranks, first_kv_heads, has_equal_shards
from qserve.parallel.expert_placement import ExpertPlacement
from tests.conftest import make_tiny
from tests.qserve.model.test_variants import reorder
from tests.qserve.model.variants import TOKENS, edited
from tests.qserve.parallel.test_sharing import assert_sharded
from tests.tiny_families import TINY_FAMILIES

exhaustive = pytest.mark.exhaustive
FEW = [("gemma4", 2)]
OTHERS = ("laguna", "step", "mimo_v2", "gemma3n")
REST = [
    ("gemma4", 4),
    *((family, size) for family in OTHERS for size in (2, 4)),
    *((family, size) for family in ("gemma4_moe", "gemma4_shared") for size in (2, 4)),
]


@pytest.mark.parametrize(
    ("family", "size"), [*FEW, *(pytest.param(*each, marks=exhaustive) for each in REST)]
)
def test_four_bits(family, size, written):
    assert_sharded(written("w4a16-sym-g32", "gptq", family), size)


def test_each_kind_of_layers_has_its_heads(tiny_model):
    decoders = assert_sharded(tiny_model("laguna"), 2)
    heads = [[layer.attention.num_heads for layer in decoder.layers] for decoder in decoders]
    assert heads == [[2, 4, 2], [2, 4, 2]]
    decoders = assert_sharded(tiny_model("mimo_v2"), 2)
    found = [
        [(layer.attention.num_kv_heads, layer.attention.value_dim) for layer in decoder.layers]
        for decoder in decoders
    ]
    assert found == [[(1, 32)] * 3] * 2
    config = ModelConfig.from_folder(tiny_model("mimo_v2"))
    firsts = [first_kv_heads(config, 2, rank) for rank in range(2)]
    assert firsts == [(0, 0, 0), (0, 1, 0)], "one KV head of two, or both the same"


def test_channel_gates_are_sharded_with_queries(tmp_path):
    """They are in one matrix with the queries."""
    name, values = TINY_FAMILIES["laguna"]
    values = {**values, "gating": "per-element", "attention_bias": False}
    assert_sharded(make_tiny(tmp_path / "x", name, values), 2)


@pytest.mark.parametrize(
    ("family", "layer"),
    [("mimo_v2", 1), pytest.param("laguna", 0, marks=exhaustive)],
)
def test_act_order(family, layer, written, tmp_path):
    """Ranks gather inputs as wide as values, which are narrower than keys in MiMo."""
    folder = edited(
        written("w4a16-sym-g32", "gptq", family),
        tmp_path / "x",
        lambda state: reorder(state, f"model.layers.{layer}.self_attn.o_proj"),
        config=lambda c: c[BLOCK].update(desc_act=True),
    )
    decoders = assert_sharded(folder, 2)
    assert decoders[0].layers[layer].attention.o_proj.order is not None


def test_scales_of_each_kv_head(tiny_model, tmp_path):
    """Layers with a window have two KV heads, others one."""
    folder = tmp_path / "heads"
    quantize_checkpoint(
        tiny_model("mimo_v2"),
        folder,
        scheme=Scheme.parse("w4a16-sym-g32"),
        output_format="compressed-tensors",
        recipe="rtn",
        kv_cache="int8",
        kv_per_head=True,
        calibration=CalibrationData(ids_WS=torch.tensor([TOKENS] * 2), source="tokens", seed=0),
        progress=False,
    )
    reader, scale = CheckpointReader(folder), "model.layers.{}.self_attn.k_scale"
    decoders = assert_sharded(folder, 2, kv_cache_dtype="auto")
    of_both = [decoder.layers[1].attention.k_scale for decoder in decoders]
    assert torch.equal(torch.cat(of_both), reader.get(scale.format(1)).flatten())
    for decoder in decoders:
        assert torch.equal(
            decoder.layers[0].attention.k_scale.flatten(), reader.get(scale.format(0)).flatten()
        )


@pytest.mark.parametrize("family", ["gemma4_shared", "gemma3n"])
def test_per_layer_embedding_table_is_sharded(family, tiny_model):
    decoders = assert_sharded(tiny_model(family), 2)
    rows = [decoder.layer_inputs.table.dense().shape[0] for decoder in decoders]
    assert rows == [256, 256]


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("laguna", {}, "4 attention heads of 2 KV heads"),
        ("gemma4", {"num_attention_heads": 12, "num_global_key_value_heads": 3}, "of 3 KV heads"),
    ],
)
def test_indivisible_heads_of_one_layer_type_are_refused(family, changed, message, tmp_path):
    name, values = TINY_FAMILIES[family]
    folder = make_tiny(tmp_path / "x", name, {**values, **changed})
    with pytest.raises(InputError, match=f"--tensor-parallel-size 8: .*{message}"):
        check_ranks(ModelConfig.from_folder(folder), 8, 1)
    assert message in inspect_checkpoint(folder).parallel[8]


@pytest.mark.parametrize(
    ("family", "changed", "scheme", "equal"),
    [
        ("llama", {"intermediate_size": 384}, "w4a16-sym", False),  # 2 and 1 groups of 128
        ("llama", {"intermediate_size": 384}, None, True),
        ("llama", {"intermediate_size": 512}, "w4a16-sym", True),
        (
            "llama",
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
            None,
            False,
        ),
        ("qwen3_moe", {}, None, True),
        ("qwen3_next", {}, None, True),
    ],
)
def test_equal_shards_are_known(family, changed, scheme, equal, tmp_path):
    name, values = TINY_FAMILIES[family]
    folder = make_tiny(tmp_path / "x", name, {**values, **changed})
    if scheme is not None:
        quantized = tmp_path / "y"
        quantize_checkpoint(
            folder, quantized, scheme=Scheme.parse(scheme), recipe="rtn", progress=False
        )
        folder = quantized
    assert has_equal_shards(ModelConfig.from_folder(folder), 2) == equal


def test_equal_shards_need_equal_numbers_of_experts(tiny_model):
    config = ModelConfig.from_folder(tiny_model("qwen3_moe"))
    total = num_experts(config.values)
    for more in (0, 1):
        half = total // 2 + more
        first, second = tuple(range(half)), tuple(range(half, total))
        placement = ExpertPlacement(same=(first, second))
        assert has_equal_shards(config, 2, placement) == (not more)


@pytest.mark.parametrize(
    "family",
    ["laguna", "step", "mimo_v2", "gemma4", "kimi_linear", "minimax", "olmo_hybrid", "ling_3"],
)
def test_inspect_agrees_with_loader(family, tiny_model):
    folder = tiny_model(family)
    for size, reason in inspect_checkpoint(folder).parallel.items():
        problem = ""
        try:
            check_ranks(ModelConfig.from_folder(folder), size, 1)
        except InputError as error:
            problem = error.problem
        assert bool(problem) == bool(reason), (size, problem, reason)
