"""GGUF files of models with experts or states are their source, and compute as transformers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from calibrate.gguf_file import quantize_to_gguf
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.gguf.architectures.converted import Order
from formats.gguf.container import read_gguf
from formats.gguf.row_moves import from_file, to_file
from formats.gguf.writing.export import export_gguf
from qserve.llm import LLM
from tests.conftest import make_tiny
from tests.formats.gguf.mixture_cases import (
    MIMO,
    MINICPM,
    MINIMAX,
    MINIMAX_PART,
    ONLY_HERE,
    OTHERS,
    USUAL,
)
from tests.formats.gguf.rewritten import rewrite
from tests.tiny_families import TINY_FAMILIES

IDS = list(range(5, 45))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Folders of GGUF files are made below this home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def make(family, different, folder):
    config_class, extra = TINY_FAMILIES[family]
    return make_tiny(folder, config_class, {**extra, **different})


def is_its_source(case, folder):
    """Every tensor is the source's, and the file's greedy tokens are transformers' of the source.

    Logarithms of exponentials, and norms whose 1 is added and subtracted, are rounded.
    """
    family, different, architecture = case
    source, file = make(family, different, folder / family), folder / "model.gguf"
    export_gguf(source, file)
    assert read_gguf(file).metadata["general.architecture"] == architecture
    found, want = CheckpointReader(file), CheckpointReader(source)
    assert found.entries.keys() == want.entries.keys()
    for name in want.entries:
        value, expected = found.get(name).float(), want.get(name).float()
        if family == "falcon_h1" and name.endswith("weight"):  # has the factors of config.json
            assert value.shape == expected.shape, name
        elif name.endswith(("A_log", "norm.weight")):
            assert torch.allclose(value, expected, atol=1e-6, rtol=1e-6), name
        else:
            assert torch.equal(value, expected), name
    logits = LLM(str(file), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        expected = model.eval()(torch.tensor([IDS])).logits[0]
    assert torch.allclose(logits, expected, atol=2e-3, rtol=0)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def name_of(case):
    return case[0]


@pytest.mark.parametrize("case", USUAL, ids=name_of)
def test_file_logits_equal_source(case, tmp_path):
    is_its_source(case, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", (*OTHERS, *ONLY_HERE), ids=name_of)
def test_other_file_logits_equal_source(case, tmp_path):
    is_its_source(case, tmp_path)


def test_fused_gate_up_stack_is_read(tmp_path):
    """llama.cpp's converter joins them on request."""
    source, file = make("qwen3_moe", {}, tmp_path / "source"), tmp_path / "model.gguf"
    export_gguf(source, file)

    def join(tensors):
        for name in [name for name in tensors if ".ffn_gate_exps." in name]:
            pair = [tensors.pop(name.replace("gate", part)) for part in ("gate", "up")]
            tensors[name.replace("gate", "gate_up")] = torch.cat(pair, dim=1)

    joined = CheckpointReader(rewrite(file, tmp_path / "joined.gguf", change=join))
    want = CheckpointReader(source)
    assert joined.entries.keys() == want.entries.keys()
    assert all(torch.equal(joined.get(name), want.get(name)) for name in want.entries)


@pytest.mark.parametrize(
    ("order", "file"),
    [
        # 1 row, then heads 0, 1 and 2, 3 of two key heads: one of each in turn
        (Order("tiled", (1, 2, 2, 1)), [0, 1, 3, 2, 4]),
        # of two key heads, one row of each of three kinds
        (Order("grouped", (2, 1, 1, 1)), [0, 3, 1, 4, 2, 5]),
        # of two heads of 5 rows, 4 rotate: 0 with 2, 1 with 3
        (Order("paired", (2, 4, 5)), [0, 2, 1, 3, 4, 5, 7, 6, 8, 9]),
    ],
)
def test_row_order_in_file(order, file):
    rows = torch.arange(order.count).unsqueeze(1)
    assert to_file(rows, order).flatten().tolist() == file
    assert torch.equal(from_file(to_file(rows, order), order), rows)


@pytest.mark.parametrize(
    ("family", "different", "words"),
    [
        ("flex_olmo", {}, "FlexOlmoForCausalLM: cannot be written as GGUF"),
        ("minimax", {}, "linear_attn_alpha_factor: expected one factor of the residual stream"),
        ("minimax", MINIMAX | {"mlp_beta_factor": 0.5}, "mlp_beta_factor: is 0.5, but minimax"),
        (
            "minimax",
            MINIMAX | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
            "num_hidden_layers: expected 2 or more, as in llama.cpp, found 1",
        ),
        ("bamba", {"time_step_limit": [0.0, 0.5]}, "time_step_limit: is .0.0, 0.5., but"),
        ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias: is True, but bamba in GGUF"),
        (
            "mamba",
            {},
            "intermediate_size: expected 128 channels, twice hidden_size, as in llama.cpp",
        ),
        ("mamba", {"intermediate_size": 128, "use_bias": True}, "in_proj.bias: and 5 more"),
        ("falcon_mamba", {"intermediate_size": 128}, "mixer_rms_eps: is 0.01, but mamba in GGUF"),
        ("minicpm3", {"mlp_bias": False}, "dim_model_base: is 32, but minicpm3 in GGUF has 256"),
        ("minicpm3", MINICPM | {"mlp_bias": True}, "mlp_bias: is True, but minicpm3 in GGUF"),
        ("mimo_v2", {}, "attention_bias: is True, but mimo_v2_flash in GGUF has False"),
        ("mimo_v2", MIMO | {"routed_scaling_factor": 1.7}, "routed_scaling_factor: is 1.7"),
        (
            "mimo_v2",
            MIMO
            | {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 100.0},
                    "sliding_attention": {
                        **{"rope_type": "default", "rope_theta": 100.0},
                        "partial_rotary_factor": 0.5,
                    },
                }
            },
            "one partial_rotary_factor, as in llama.cpp",
        ),
        (
            "glm_moe_dsa",
            {"mlp_layer_types": ["dense", "sparse", "sparse"]},
            "index_head_dim: expected a power of two from 64 on",
        ),
        ("laguna", {}, "attention_bias: is True, but laguna in GGUF has False"),
        (
            "laguna",
            {
                "attention_bias": False,
                "rope_parameters": {
                    "full_attention": {
                        **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
                        **{"original_max_position_embeddings": 16, "attention_factor": 1.2},
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
            "attention_factor: expected 1.1386, as llama.cpp computes it, found 1.2",
        ),
        ("solar_open", {}, "n_group: is 4, but glm4_moe in GGUF has 1"),
        ("mellum", {}, "expected experts in all layers"),
        ("mellum", {"mlp_layer_types": ["sparse"] * 3}, "one rope_theta in all layers"),
        ("llama4", {}, "expected every n-th layer, from layer n - 1"),
        ("qwen3_5", {}, "linear_value_head_dim: expected linear_key_head_dim, 16, found 24"),
        ("olmoe", {}, "num_key_value_heads: expected 4, as many as heads, in olmoe, found 2"),
        ("dots1", {"num_key_value_heads": 4}, "dots1 has no windows in GGUF"),
    ],
)
def test_model_unsupported_by_llama_cpp_is_refused(tmp_path, family, different, words):
    source = make(family, different, tmp_path / family)
    with pytest.raises(InputError, match=words):
        export_gguf(source, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ssm.state_size", 8, "does not fit the model's sizes"),
        ("ssm.group_count", 0, "group_count: expected a positive whole number, found 0"),
        ("ssm.group_count", 3, "time_step_rank: expected a multiple of 3 key heads"),
        ("ssm.inner_size", 63, "inner_size: expected 4 heads of one width"),
    ],
)
def test_sizes_not_divisible_by_value_heads_are_refused(tmp_path, key, value, words):
    """Metadata that lie about heads are found before any row is moved."""
    source, file = make("qwen3_5", {"linear_value_head_dim": 16}, tmp_path / "s"), tmp_path / "m"
    file = file.with_suffix(".gguf")
    export_gguf(source, file)
    data, name = file.read_bytes(), f"qwen35.{key}".encode()
    at = data.index(name) + len(name) + 4
    file.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
    with pytest.raises(InputError, match=words):
        CheckpointReader(file)


def test_reordered_columns_use_blocks_of_32(tmp_path):
    """Inputs of Qwen3.5's out_proj move by heads of 32: blocks of 256 would be torn."""
    different = {
        **{"linear_value_head_dim": 32, "linear_key_head_dim": 32, "linear_num_value_heads": 8},
        **{"hidden_size": 256, "intermediate_size": 256, "linear_num_key_heads": 2},
    }
    source, file = make("qwen3_5", different, tmp_path / "source"), tmp_path / "model.gguf"
    report = quantize_to_gguf(
        source, file, scheme="q4_k_m", recipe="rtn", quality_windows=0, progress=False
    )
    stored = read_gguf(file).tensors
    kinds = {name: each.type.name for name, each in stored.items() if ".ssm_out." in name}
    assert kinds and set(kinds.values()) == {"Q5_0"}
    assert "Q4_K" in {each.type.name for each in stored.values()}
    words = f"{len(kinds)} linears of heads of 32 inputs are q5_0 instead of q4_k"
    assert [line for line in report.warnings if words in line]
    found, want = CheckpointReader(file, as_floats=True), CheckpointReader(source)
    names = [name for name in want.entries if name.endswith("out_proj.weight")]
    assert len(names) == len(kinds)
    for name in names:
        value, expected = found.get(name).float(), want.get(name).float()
        assert float((value - expected).norm() / expected.norm()) < 0.06, name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "different"),
    [
        ("olmoe", {"num_key_value_heads": 4, "hidden_size": 256, "intermediate_size": 256}),
        ("nemotron_h", {"hidden_size": 256, "intermediate_size": 256}),
        ("bamba", {"hidden_size": 256, "intermediate_size": 256, "mamba_d_head": 64}),
        ("minimax", {**MINIMAX, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}),
        ("mamba", {"hidden_size": 256, "intermediate_size": 512}),
        ("jamba", {"hidden_size": 256, "intermediate_size": 256}),
    ],
)
def test_quantized_file_runs_packed(tmp_path, family, different):
    """Experts, and layers with states, in K-quants: blocks in kernels, and the floats they mean."""
    source, file = make(family, different, tmp_path / family), tmp_path / "model.gguf"
    quantize_to_gguf(source, file, scheme="q4_k_m", recipe="rtn", quality_windows=0, progress=False)
    assert "Q4_K run packed" in CheckpointReader(file).gguf_summary
    # a float file of the decoded weights
    weights = CheckpointReader(file, as_floats=True)
    for shard in tmp_path.glob(f"{family}/*.safetensors"):
        shard.unlink()
    save_file(
        {name: weights.get(name).contiguous() for name in weights.entries},
        source / "model.safetensors",
    )
    found, want = (
        LLM(str(each), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
        for each in (file, source)
    )
    assert float((found - want).norm() / want.norm()) < 1e-3


def test_minimax_uses_partial_rotary(tmp_path):
    """Under the key of published files."""
    source, file = make(*MINIMAX_PART[:2], tmp_path / "source"), tmp_path / "model.gguf"
    export_gguf(source, file)
    assert read_gguf(file).metadata["minimax-01.rope.dimension_count"] == 16
    config = json.loads((CheckpointReader(file).folder / "config.json").read_text())
    assert config["rotary_dim"] == 16
    found, want = (
        LLM(str(each), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
        for each in (file, source)
    )
    assert torch.equal(found, want)


def test_minimax_defaults_to_attention_every_eighth_layer(tmp_path):
    """llama.cpp's converter does not write them."""
    kinds = [*["linear_attention"] * 7, "full_attention", "linear_attention"]
    different = {**MINIMAX, "num_hidden_layers": len(kinds), "layer_types": kinds}
    source, file = make("minimax", different, tmp_path / "source"), tmp_path / "model.gguf"
    export_gguf(source, file)
    data, key = file.read_bytes(), b"minimax-01.attention.recurrent_layers"
    assert data.count(key) == 1
    file.write_bytes(data.replace(key, b"x" * len(key)))
    found = CheckpointReader(file)
    assert found.config["layer_types"] == kinds
    assert found.entries.keys() == CheckpointReader(source).entries.keys()


def test_config_json_has_layer_types(tmp_path):
    """Layers with states have no KV heads in metadata."""
    file = tmp_path / "model.gguf"
    export_gguf(make("nemotron_h", {}, tmp_path / "source"), file)
    heads = list(read_gguf(file).metadata["nemotron_h.attention.head_count_kv"])
    assert heads == [0, 2, 0, 0]
    config = json.loads((CheckpointReader(file).folder / "config.json").read_text())
    assert config["layers_block_type"] == [
        *("linear_attention", "full_attention", "mlp", "linear_attention")
    ]


def test_mimo_window_size_equals_transformers(tmp_path):
    """The published config.json states `sliding_window_size`, which transformers reads so."""
    source, file = make("mimo_v2", MIMO, tmp_path / "mimo"), tmp_path / "model.gguf"
    config = json.loads((source / "config.json").read_text())
    config |= {"sliding_window": 8, "sliding_window_size": 8}
    (source / "config.json").write_text(json.dumps(config))
    export_gguf(source, file)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        expected = model.eval()(torch.tensor([IDS])).logits[0]
    for folder in (source, file):
        logits = LLM(str(folder), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
        assert torch.allclose(logits, expected, atol=2e-3, rtol=0), folder
