"""MiMo-V2.5: published keys, and queries, keys and values fused in shards, in float and float8."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.files.memory_tensors import MemoryTensors
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.qserve.parallel.test_sharing import assert_sharded
from tests.tiny_families import TINY_FAMILIES

BLOCK = (32, 32)
SHARDS = 2
ROPES = {"rope_type": "default", "partial_rotary_factor": 0.5}
SPLIT = (
    "MiMoV2FlashConfig",
    {
        **TINY_FAMILIES["mimo_v2"][1],
        **{"attention_bias": False, "num_key_value_heads": SHARDS, "sliding_window": 9},
        "rope_parameters": {
            "full_attention": {**ROPES, "rope_theta": 1000.0},
            "sliding_attention": {**ROPES, "rope_theta": 100.0},
        },
    },
)
PARTS = {
    "visual.blocks.0.attn.proj.weight": torch.ones(4, 4),
    "audio_encoder.x.weight": torch.ones(4, 4),
    "speech_embeddings.0.weight": torch.ones(4, 4),
    "model.mtp.layers.0.eh_proj.weight": torch.ones(64, 128),
}


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("mimo") / "model", *SPLIT)


def as_published(config):
    config |= {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2"}
    kinds, sparse = config.pop("layer_types"), config.pop("mlp_layer_types")
    config["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
    config["moe_layer_freq"] = [int(kind == "sparse") for kind in sparse]
    ropes = config.pop("rope_parameters")
    config["rope_theta"] = ropes["full_attention"]["rope_theta"]
    config["swa_rope_theta"] = ropes["sliding_attention"]["rope_theta"]
    config |= {"partial_rotary_factor": 0.5, "layernorm_epsilon": config.pop("rms_norm_eps")}
    config |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
    config |= {"swa_head_dim": config["head_dim"], "swa_v_head_dim": config["v_head_dim"]}
    config |= {"sliding_window_size": config.pop("sliding_window") - 1, "sliding_window": 8}
    config |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
    config["attention_projection_layout"] = "fused_qkv"
    config["vision_config"] = {"hidden_size": 4}


def fused(state):
    """Each shard has the queries, keys and values of its heads."""
    for layer in range(3):
        stem = f"model.layers.{layer}.self_attn"
        q, k, v = (state.pop(f"{stem}.{x}_proj.weight").chunk(SHARDS) for x in "qkv")
        shards = [torch.cat(parts) for parts in zip(q, k, v, strict=True)]
        state[f"{stem}.qkv_proj.weight"] = torch.cat(shards)
    state |= PARTS


def in_float8(weight_NK):
    """Codes and scales of blocks; the last ones of a matrix may be cut."""
    (N, K), (rows, columns) = weight_NK.shape, BLOCK
    scales = torch.empty(-(-N // rows), -(-K // columns))
    codes = torch.empty(N, K, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight_NK[own].abs().max() / 448
            codes[own] = (weight_NK[own] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def dequantized(codes_NK, scales):
    of_rows = scales.repeat_interleave(BLOCK[0], 0)[: len(codes_NK)]
    return codes_NK.float() * of_rows.repeat_interleave(BLOCK[1], 1)[:, : codes_NK.shape[1]]


@pytest.fixture(scope="module")
def published(split, tmp_path_factory):
    return edited(split, tmp_path_factory.mktemp("mimo") / "fused", fused, as_published)


@pytest.fixture(scope="module")
def native(split, tmp_path_factory):
    """(folder with codes in float8, folder of the floats that they mean)"""
    folder, plain = (tmp_path_factory.mktemp("mimo") / name for name in ("fp8", "plain"))
    state, meant = load_file(split / "model.safetensors"), {}
    fused(state)
    codes = dict(state)
    linears = [n for n in state if n.endswith("_proj.weight") and n not in PARTS]
    for name in linears:
        if name.endswith("o_proj.weight"):
            continue
        shards = state[name].chunk(SHARDS if "qkv" in name else 1)
        made = [in_float8(shard) for shard in shards]
        codes[name] = torch.cat([c for c, _ in made])
        codes[f"{name}_scale_inv"] = torch.cat([s for _, s in made])
        meant[name] = torch.cat([dequantized(*each) for each in made])
        if "qkv" in name:  # read as bfloat16
            meant[name] = meant[name].bfloat16().float()
    config = json.loads((split / "config.json").read_text())
    as_published(config)
    config["quantization_config"] = {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        "weight_block_size": list(BLOCK),
        "ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(3)],
    }
    write(folder, config, codes)
    config = json.loads((split / "config.json").read_text())
    as_published(config)
    write(plain, config, {**state, **meant})
    return folder, plain


def write(folder, config, state):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_fused_logits_equal_separate_tensors(split, published, transformers_model):
    with torch.no_grad():
        want = transformers_model(split)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(published), want) < 1e-5
    reader = CheckpointReader(published)
    assert reader.entries["model.layers.1.self_attn.v_proj.weight"].shape == (128, 64)
    assert set(reader.other_parts) == {name for name in PARTS if "mtp" not in name}


def test_tokens_in_chunks(split, published, transformers_model):
    llm = LLM(published, device="cpu", max_model_len=64, max_num_batched_tokens=11)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [TOKENS, TOKENS[::-1], [5, 9, 77] * 6]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_greedy(transformers_model(split), prompts, outputs)


def test_float8_has_blocks_of_each_shard(native):
    """Keys begin inside of a block: a shard has 96 + 48 + 32 rows, or 96 + 96 + 64."""
    folder, plain = native
    name = "model.layers.0.self_attn.{}_proj.weight"
    read, want = CheckpointReader(folder), CheckpointReader(plain)
    for x in "qkv":
        assert torch.equal(read.get(name.format(x)).float(), want.get(name.format(x)))
    assert read.entries[name.format("k")].dtype == torch.bfloat16
    # inputs of the other linears are rounded to float8, too
    assert relative(logits(folder), logits(plain)) < 0.15
    problems = inspect_checkpoint(folder).problems
    assert all("has no tokenizer" in problem.text for problem in problems), problems


def test_two_ranks(published):
    assert_sharded(published, 2)


def test_tensors_in_memory(native):
    folder, plain = native
    state = load_file(folder / "model.safetensors")
    held = MemoryTensors(state.items(), CheckpointReader(folder).config)
    want = CheckpointReader(plain)
    for x in "qkv":
        name = f"model.layers.1.self_attn.{x}_proj.weight"
        assert torch.equal(held.get(name).float(), want.get(name))


def test_written_files_have_separate_tensors(published, tmp_path):
    folder = tmp_path / "model"
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(published, folder, scheme=scheme, recipe="rtn", progress=False)
    config = json.loads((folder / "config.json").read_text())
    assert config["attention_projection_layout"] == "split"
    assert config["architectures"] == ["MiMoV2ForCausalLM"]
    names = CheckpointReader(folder).entries
    assert "model.layers.1.self_attn.k_proj.weight_packed" in names
    assert {"visual", "audio_encoder"} <= {
        name.split(".")[0] for name in CheckpointReader(folder).other_parts
    }
    assert logits(folder).isfinite().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"swa_v_head_dim": 16}, r"config\.json swa_v_head_dim: expected 32"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias: expected false"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern: expected a list with 0 or 1"),
        ({"swa_num_key_value_heads": 3}, "qkv_proj.weight: expected 2 shards with the rows of"),
    ],
)
def test_other_shapes_are_refused(published, tmp_path, changed, message):
    folder = edited(published, tmp_path / "x", config=lambda c: c.update(changed))
    with pytest.raises(InputError, match=message):
        logits(folder)


def exchanged(state):
    """All queries, then all keys, then all values."""
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.qkv_proj.weight"
        kv = 48 if layer != 1 else 96
        shards = [s.split([96, kv, len(s) - 96 - kv]) for s in state[name].chunk(SHARDS)]
        state[name] = torch.cat([part for parts in zip(*shards, strict=True) for part in parts])


def test_wrong_order_fails_comparison(published, tmp_path):
    folder = edited(published, tmp_path / "x", exchanged)
    assert relative(logits(folder), logits(published)) > 1e-3


@pytest.mark.parametrize(
    "changed",
    [
        {"swa_rope_theta": 1000.0},
        {"partial_rotary_factor": 1.0},
        {"sliding_window_size": 7},
    ],
)
def test_published_keys_are_read(published, tmp_path, changed):
    folder = edited(published, tmp_path / "x", config=lambda c: c.update(changed))
    assert relative(logits(folder), logits(published)) > 1e-3
