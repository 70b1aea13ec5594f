"""The table of families: it names every tensor of every model that the tests have, in its shape."""

import dataclasses
import json
import math

import pytest

from formats.architecture.padding import WIDENED
from formats.architecture.projection import Projection
from formats.architecture.sizes import num_experts, size
from formats.architecture.stored_form.config import canonical_config
from formats.checkpoint import CheckpointReader
from formats.families import FAMILIES, checked_family
from formats.heads.folder import is_head_folder
from formats.inspection.parallel import SPLIT_BY_INPUTS
from formats.rules import FUSED
from tests.conftest import ROOT
from tests.own_code.models import TINY_MODELS
from tests.tiny_families import TINY_FAMILIES
from tests.tiny_vision import VISION_FAMILIES

BUNDLED = sorted(
    path.parent
    for path in (ROOT / "examples" / "models").glob("*/config.json")
    if not is_head_folder(path.parent)  # a draft head is no model
)


def check_names_and_shapes(folder):
    reader = CheckpointReader(folder)
    family = FAMILIES[reader.config["architectures"][0]].variant(reader.config)
    sizes = family.sizes(reader.config)
    stated = {
        name: tuple(size(names, sizes) for names in shape)
        for name, shape in family.tensors(reader.config).items()
    }
    unread = family.unread(reader.config)
    found = {name: e.shape for name, e in reader.entries.items() if not name.startswith(unread)}
    assert found == stated
    return family


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_family_row_covers_every_tensor_of_tiny_model(tiny_model, name):
    folder = tiny_model(name)
    family = check_names_and_shapes(folder)
    config = canonical_config(json.loads((folder / "config.json").read_text()))
    assert family.model_type == config["model_type"]
    if family.activation_key:
        assert config[family.activation_key] == family.activations[0]


@pytest.mark.parametrize("folder", BUNDLED, ids=lambda path: path.name)
def test_family_row_covers_every_tensor_of_bundled_model(folder):
    check_names_and_shapes(folder)


GEMMA_4 = {
    **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"},
    **{"vocab_size": 262144, "head_dim": 256, "global_head_dim": 512},
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "tie_word_embeddings": True},
}
PUBLISHED = {
    # without the table of per-layer embeddings
    "E2B": (
        2.3e9,
        {
            **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35},
            **{"num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20},
            **{"hidden_size_per_layer_input": 256, "use_double_wide_mlp": True},
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        },
    ),
    "26B-A4B": (
        25.2e9,
        {
            **{"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30},
            **{"num_attention_heads": 16, "num_key_value_heads": 8},
            **{"num_global_key_value_heads": 2, "attention_k_eq_v": True},
            **{"enable_moe_block": True, "num_experts": 128, "moe_intermediate_size": 704},
        },
    ),
    "31B": (
        30.7e9,
        {
            **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60},
            **{"num_attention_heads": 32, "num_key_value_heads": 16},
            **{"num_global_key_value_heads": 4, "attention_k_eq_v": True},
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_gemma_4_parameter_count_equals_model_card(name):
    """The row's shapes add up to the number that the model card states."""
    stated, different = PUBLISHED[name]
    config = canonical_config({**GEMMA_4, **different})
    family = FAMILIES["Gemma4ForCausalLM"].variant(config)
    sizes = family.sizes(config)
    counts = {
        tensor: math.prod(size(names, sizes) for names in shape)
        for tensor, shape in family.tensors(config).items()
        if tensor != "model.embed_tokens_per_layer.weight"
    }
    assert sum(counts.values()) == pytest.approx(stated, rel=0.01)


DEEPSEEK_V4 = {
    "Flash": (
        284e9,
        {
            **{"hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64},
            **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "q_lora_rank": 1024},
            **{"o_groups": 8, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]},
        },
    ),
    "Pro": (
        1.6e12,
        {
            **{"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128},
            **{"moe_intermediate_size": 3072, "n_routed_experts": 384, "q_lora_rank": 1536},
            **{"o_groups": 16, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]},
        },
    ),
}


@pytest.mark.parametrize("name", DEEPSEEK_V4)
def test_parameters_of_published_deepseek_v4(name):
    """The number is stated with the model, without the MTP layer's; that of Pro is rounded."""
    stated, different = DEEPSEEK_V4[name]
    family = FAMILIES["DeepseekV4ForCausalLM"]
    config = canonical_config(
        {"architectures": [family.architecture], "model_type": family.model_type} | different
    )
    sizes = family.sizes({**config, "vocab_size": 129280})
    shapes = family.tensors(config)
    count = sum(
        math.prod(size(names, sizes) for names in shape)
        for tensor, shape in shapes.items()
        if not tensor.endswith("tid2eid")
    )
    assert count == pytest.approx(stated, rel=0.005 if name == "Flash" else 0.02)


def test_parameters_of_published_minimax_m3():
    """The row's shapes, by published keys, add up to the 428 billion of the model card."""
    layers = [0] * 3 + [1] * 57
    config = canonical_config(
        {
            **{"architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3"},
            **{"vocab_size": 200064, "hidden_size": 6144, "num_hidden_layers": 60},
            **{"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
            **{"intermediate_size": 3072, "dense_intermediate_size": 12288},
            **{"shared_intermediate_size": 3072, "num_local_experts": 128, "n_shared_experts": 1},
            **{"moe_layer_freq": layers, "tie_word_embeddings": False},
            "sparse_attention_config": {
                **{"sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_block_size": 128},
                **{"sparse_topk_blocks": 16, "sparse_local_block": 1},
                **{"sparse_attention_freq": layers, "sparse_disable_index_value": layers},
            },
        }
    )
    family = FAMILIES[config["architectures"][0]]
    sizes = family.sizes(config)
    counts = [
        math.prod(size(names, sizes) for names in shape)
        for shape in family.tensors(config).values()
    ]
    assert sum(counts) == pytest.approx(428e9, rel=0.01)


def test_parameters_of_published_dots3_note():
    """The row's shapes, by published keys, add up to the 280 billion of the model card."""
    full = {0, 1, *range(5, 46, 4)}
    config = canonical_config(
        {
            **{"architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note"},
            **{"vocab_size": 152064, "hidden_size": 5120, "num_hidden_layers": 46},
            **{"intermediate_size": 13824, "moe_intermediate_size": 1536},
            **{"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 1},
            **{"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1024},
            **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "swa_num_attention_heads": 64, "swa_q_lora_rank": 1024},
            **{"swa_kv_lora_rank": 1024, "swa_qk_nope_head_dim": 192, "swa_v_head_dim": 128},
            **{"swa_qk_rope_head_dim": 64, "index_n_heads": 64, "index_head_dim": 128},
            "layer_types": [
                "full_attention" if i in full else "sliding_attention" for i in range(46)
            ],
            "tie_word_embeddings": False,
        }
    )
    family = FAMILIES[config["architectures"][0]]
    sizes = family.sizes(config)
    counts = [
        math.prod(size(names, sizes) for names in shape)
        for shape in family.tensors(config).values()
    ]
    assert sum(counts) == pytest.approx(280e9, rel=0.005)
    assert len(full) == 13


# Text models that exist only with a vision tower -> their tiny models (tests/tiny_vision)
ONLY_WITH_IMAGES = {"Ernie4_5_VLMoeForCausalLM": "ernie_vl"}


def test_every_row_has_a_tiny_model(tiny_model, own_code):
    folders = [*map(tiny_model, TINY_FAMILIES), *map(own_code, TINY_MODELS)]
    configs = [CheckpointReader(folder).config for folder in folders]
    assert set(ONLY_WITH_IMAGES.values()) <= set(VISION_FAMILIES)
    found = {config["architectures"][0] for config in configs}
    assert found | set(ONLY_WITH_IMAGES) == set(FAMILIES)


def test_derived_tables_equal_literals():
    """As literals: a change of the table that changes these is seen."""
    assert FUSED == {
        ("q_proj", "k_proj", "v_proj"): "qkv_proj",
        ("gate_proj", "up_proj"): "gate_up_proj",
        ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj",
        ("wq_a", "wkv"): "fused_wqa_wkv",
        ("in_proj_qkv", "in_proj_z"): "in_proj_qkvz",
        ("in_proj_b", "in_proj_a"): "in_proj_ba",
        ("qkv_proj", "output_gate"): "qkv_gate_proj",
        ("f_proj", "b_proj"): "kda_fb_proj",
        ("query_key_value", "g_proj"): "qkv_g_proj",
        ("w1", "w3"): "w13",
        ("c_fc_0", "c_fc_1"): "gate_up_proj",
    }
    assert WIDENED == {
        "mlp.gate_proj": (0, 1),
        "mlp.up_proj": (0, 1),
        "mlp.down_proj": (1, 1),
        "mlp.gate_up_proj": (0, 2),
        "mlp.c_fc": (0, 1),
        "mlp.c_proj": (1, 1),
        "fc1": (0, 1),
        "fc2": (1, 1),
        "mlp.fc1": (0, 1),
        "mlp.fc2": (1, 1),
        "mlp.dense_h_to_4h": (0, 1),
        "mlp.dense_4h_to_h": (1, 1),
        "mlp.fc_in": (0, 1),
        "mlp.fc_out": (1, 1),
        "feed_forward.w1": (0, 1),
        "feed_forward.w3": (0, 1),
        "feed_forward.w2": (1, 1),
        "feed_forward.gate_proj": (0, 1),
        "feed_forward.up_proj": (0, 1),
        "feed_forward.down_proj": (1, 1),
        "shared_mlp.input_linear": (0, 2),
        "shared_mlp.output_linear": (1, 1),
        "mixer.up_proj": (0, 1),
        "mixer.down_proj": (1, 1),
        "ffn.up_proj": (0, 1),
        "ffn.down_proj": (1, 1),
        "mlp.c_fc_0": (0, 1),
        "mlp.c_fc_1": (0, 1),
        "mlp.w1": (0, 1),
        "mlp.w2": (0, 1),
    }
    names = ("o_proj", "down_proj", "w2", "out_proj", "fc2", "c_proj", "dense", "dense_4h_to_h")
    names = (*names, "wo")
    assert set(SPLIT_BY_INPUTS) == {f".{name}" for name in (*names, "fc_out", "output_linear")}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_linears_alternate_output_and_input_sharding(family):
    """So that ranks exchange nothing but the sums after o and down."""
    assert {projection.split for projection in family.latent} <= {"outputs"}
    inputs = family.layer_inputs  # of families that are not divided
    apart = (*family.latent, *((inputs.gate, inputs.projection) if inputs else ()))
    apart = (*apart, family.head_gates)  # of families that are not divided
    if family.query_up is not None:  # every rank computes attention of all heads
        apart = (*apart, family.qkv, family.query_up, family.o)
        assert {each.split for each in (family.qkv, family.query_up, family.o)} == {"outputs"}
    others = [each for each in family.projections(num_experts=1) if each not in apart]
    first, second = others[0::2], others[1::2]
    assert {projection.split for projection in first} == {"outputs"}
    assert {projection.split for projection in second} == {"inputs"}
    for before, after in zip(first, second, strict=True):
        assert after.inputs in (
            "q",
            "local_o",
            "mamba_channels",
            "mamba_inner",
            *(size for _, size in before.members),
        )


def test_checked_family_by_model_type():
    assert checked_family({"model_type": "qwen2"}) is FAMILIES["Qwen2ForCausalLM"]
    assert checked_family({"model_type": "mixtral"}) is None, "it knows no rules of its config"
    assert checked_family({}) is None


def test_expert_index_is_substituted_in_names():
    projection = Projection(
        name="x.{e}.both", members=(("x.{e}.a", "q"), ("x.{e}.b", "kv")), inputs="hidden_size"
    )
    assert [linear.name for linear in projection.expert(7).linears] == ["x.7.a", "x.7.b"]
    fused = dataclasses.replace(projection, stored_fused=True).expert(7)
    assert [(linear.name, linear.outputs) for linear in fused.linears] == [
        ("x.7.both", ("q", "kv"))
    ]
    assert num_experts({"num_local_experts": 4}) == 4
    assert num_experts({"num_experts": True}) is None


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ({"num_attention_heads": 4, "hidden_size": 64}, (16, 64, 64)),
        ({"num_attention_heads": 4, "hidden_size": 64, "head_dim": 32}, (32, 128, 128)),
        ({"num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": 2}, (16, 64, 32)),
        ({"num_attention_heads": "4", "hidden_size": 64}, (None, None, None)),
        ({"num_attention_heads": 4, "head_dim": -1}, (None, None, None)),
        ({"num_attention_heads": 4, "head_dim": None, "hidden_size": 64}, (16, 64, 64)),
    ],
)
def test_head_sizes(numbers, found):
    sizes = FAMILIES["LlamaForCausalLM"].sizes(numbers)
    assert tuple(sizes[name] for name in ("head_dim", "q", "kv")) == found
    assert size(("q", "kv", "kv"), sizes) == (found[1] + 2 * found[2] if found[1] else None)


def test_default_sizes_without_config_keys():
    sizes = FAMILIES["Qwen3ForCausalLM"].sizes({"num_attention_heads": 4})
    assert (sizes["head_dim"], sizes["q"], sizes["kv"]) == (128, 4 * 128, 32 * 128)
