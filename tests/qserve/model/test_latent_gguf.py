"""GGUF files of models with latent attention, as llama.cpp's converter writes them.

It splits kv_b_proj by head: attn_k_b is the part of keys, transposed, attn_v_b that of values.
Older files have attn_kv_b.
"""

import json
import re

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.files.model_path import model_folder
from formats.gguf.container import read_gguf
from formats.gguf.writing.export import export_gguf
from formats.scheme import Scheme
from qserve.model.model_config import ModelConfig
from tests.formats.gguf.written import F32, Q8_0, blocks, write_gguf
from tests.qserve.model.variants import TOKENS, edited, logits, model_maker, relative
from tests.tiny_families import GROUPS, LATENT, YARN

# widths that are whole blocks of 32
IN_BLOCKS = {**LATENT, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_shared_experts": 1}
NO_SCALING = {"rope_type": "default", "rope_theta": 50000.0}
VARIANTS = {
    "v2": (
        "DeepseekV2Config",
        {
            **{**IN_BLOCKS, **GROUPS, "q_lora_rank": 96, "topk_method": "group_limited_greedy"},
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v2 lite": (
        "DeepseekV2Config",
        {
            **{**IN_BLOCKS, "q_lora_rank": None, "topk_method": "greedy"},
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v3": (
        "DeepseekV3Config",
        {
            **{**IN_BLOCKS, **GROUPS, "q_lora_rank": 96},
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "moonlight": (
        "DeepseekV3Config",
        {
            **{**IN_BLOCKS, **GROUPS, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
            "rope_parameters": NO_SCALING,
        },
    ),
    "glm-4.7-flash": (
        "Glm4MoeLiteConfig",
        {
            **{**IN_BLOCKS, **GROUPS, "n_group": 1, "topk_group": 1, "q_lora_rank": 96},
            "pad_token_id": 0,
        },
    ),
}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{ours}_proj": f"attn_{ours}" for ours in ("q", "q_a", "q_b", "kv_b")},
    **{"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.o_proj": "attn_output"},
    **{f"self_attn.{x}_a_layernorm": f"attn_{x}_a_norm" for x in ("q", "kv")},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@pytest.fixture(scope="session")
def model_of(tiny_model, tmp_path_factory):
    return model_maker(tiny_model, tmp_path_factory, VARIANTS)


def metadata_of(config, *, is_split):
    """llama.cpp's metadata; `is_split`: of files with attn_k_b, whose cache is one head's."""
    keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    by_sigmoid = config["model_type"] != "deepseek_v2"
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "leading_dense_block_count": 1,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1 if is_split else config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": by_sigmoid,
        "expert_gating_func": 2 if by_sigmoid else 1,
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": config["qk_rope_head_dim"],
    }
    if config["q_lora_rank"]:
        own["attention.q_lora_rank"] = config["q_lora_rank"]
    if (config["n_group"] or 1) > 1:
        own["expert_group_count"] = config["n_group"]
        own["expert_group_used_count"] = config["topk_group"]
    widths = {"key_length": keys, "value_length": config["v_head_dim"]}
    if is_split:
        widths = {f"{key}_mla": width for key, width in widths.items()}
        widths["key_length"] = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        widths["value_length"] = config["kv_lora_rank"]
    own |= {f"attention.{key}": width for key, width in widths.items()}
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        own |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    found = {f"deepseek2.{key}": value for key, value in own.items()}
    return {"general.architecture": "deepseek2", **found}


def tensors_of(folder, kind, *, is_split):
    """The file's tensors by name, each with its type: matrices of layers have `kind`."""
    reader = CheckpointReader(folder)
    config, found, stacks = reader.config, {}, {}
    for name in reader.entries:
        weight = reader.get(name).float()
        if name in OUTER:
            found[OUTER[name]] = weight, F32
            continue
        number, local = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
        stem, local = f"blk.{number}", local.removesuffix(".weight")
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj", local)
        if expert:
            stacks.setdefault(f"{stem}.ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = weight
        elif local == "mlp.gate.e_score_correction_bias":
            found[f"{stem}.exp_probs_b.bias"] = weight, F32
        elif local == "self_attn.kv_b_proj" and is_split:
            by_head = weight.unflatten(0, (config["num_attention_heads"], -1))
            keys, values = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            found[f"{stem}.attn_k_b.weight"] = keys.transpose(1, 2), kind
            found[f"{stem}.attn_v_b.weight"] = values, kind
        else:
            is_plain = weight.ndim == 1 or local == "mlp.gate"
            found[f"{stem}.{NAMES[local]}.weight"] = weight, F32 if is_plain else kind
    for name, experts in stacks.items():
        found[name] = torch.stack([experts[number] for number in sorted(experts)]), kind
    return found


def write(folder, path, kind, *, is_split=True, change=None):
    config = json.loads((folder / "config.json").read_text())
    metadata = metadata_of(config, is_split=is_split)
    tensors = tensors_of(folder, kind, is_split=is_split)
    if change:
        change(metadata, tensors)
    return write_gguf(path, metadata, tensors)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Folders of GGUF files are made in a folder of the test."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(model_of, transformers_model, tmp_path, name):
    folder = model_of(name)
    file = write(folder, tmp_path / "model.gguf", F32)
    with torch.no_grad():
        want = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(file), want) < 1e-5


def test_older_files_have_one_matrix_of_keys_and_values(model_of, transformers_model, tmp_path):
    folder = model_of("v2 lite")
    file = write(folder, tmp_path / "model.gguf", F32, is_split=False)
    with torch.no_grad():
        want = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(file), want) < 1e-5


def rounded(weight):
    """Values of a matrix's Q8_0 blocks: 32 codes and a float16 scale each."""
    data = torch.frombuffer(bytearray(blocks(weight.contiguous(), Q8_0)), dtype=torch.uint8)
    rows = data.view(-1, 34)
    scales = rows[:, :2].contiguous().view(torch.float16).float()
    return (rows[:, 2:].contiguous().view(torch.int8).float() * scales).reshape(weight.shape)


@pytest.mark.parametrize("name", ["v3", "v2 lite"])
def test_logits_of_codes_equal_transformers(model_of, transformers_model, tmp_path, name):
    """Each part of kv_b_proj is rounded along its own inputs."""
    folder = model_of(name)
    file = write(folder, tmp_path / "model.gguf", Q8_0)
    config = json.loads((folder / "config.json").read_text())
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]

    def change(state):
        for key, weight in state.items():
            if ".layers." not in key or weight.ndim != 2 or ".mlp.gate." in key:
                continue
            if "kv_b_proj" in key:
                keys, values = weight.unflatten(0, (heads, -1)).split(
                    [nope, config["v_head_dim"]], dim=1
                )
                keys = rounded(keys.transpose(1, 2)).transpose(1, 2)
                state[key] = torch.cat([keys, rounded(values)], dim=1).flatten(0, 1).contiguous()
            else:
                state[key] = rounded(weight)

    dense = edited(folder, tmp_path / "dense", change)
    with torch.no_grad():
        want = transformers_model(dense)(torch.tensor([TOKENS])).logits[0]
        exact = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(file), want) < 1e-5 < relative(exact, want)


def test_routing_metadata_is_read(model_of, tmp_path):
    """Without a gating function and groups, experts are chosen by softmax, as in V2-Lite."""

    def change(metadata, tensors):
        del metadata["deepseek2.expert_gating_func"], metadata["deepseek2.expert_weights_norm"]

    file = write(model_of("v2 lite"), tmp_path / "model.gguf", F32, change=change)
    config = ModelConfig.from_folder(model_folder(file))
    assert config.family.architecture == "DeepseekV2ForCausalLM"
    assert not config.values["norm_topk_prob"] and config.values["topk_method"] == "greedy"


def without_values(metadata, tensors):
    del tensors["blk.1.attn_v_b.weight"]


def wide_rope(metadata, tensors):
    metadata["deepseek2.rope.dimension_count"] = 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_values, r"blk.1.attn_k_b.weight: expected \[4, latent, key\] and attn_v_b"),
        (wide_rope, r"attention.key_length: expected more than 64, found 48"),
    ],
)
def test_incompatible_sizes_are_refused(model_of, tmp_path, change, words):
    file = write(model_of("v3"), tmp_path / "model.gguf", F32, change=change)
    with pytest.raises(InputError, match=words):
        logits(file)


@pytest.mark.parametrize("name", VARIANTS)
def test_written_file_equals_llama_cpp_converter(model_of, transformers_model, tmp_path, name):
    """Names, shapes, values and metadata of the converter's file; and it computes as its source."""
    folder = model_of(name)
    export_gguf(folder, tmp_path / "ours.gguf")
    ours, theirs = (
        read_gguf(file)
        for file in (tmp_path / "ours.gguf", write(folder, tmp_path / "theirs.gguf", F32))
    )
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, want in theirs.tensors.items():
        assert ours.tensors[key].shape == want.shape, key
    assert (
        ours.metadata.items()
        >= {
            **theirs.metadata,
            "deepseek2.rope.freq_base": pytest.approx(theirs.metadata["deepseek2.rope.freq_base"]),
        }.items()
    )
    found = CheckpointReader(tmp_path / "ours.gguf")
    want = CheckpointReader(folder)
    assert found.entries.keys() == want.entries.keys()
    for key in want.entries:
        assert torch.equal(found.get(key).float(), want.get(key).float()), key
    with torch.no_grad():
        logits_TV = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(tmp_path / "ours.gguf"), logits_TV) < 1e-5


def quantized(folder, target, ignore=()):
    quantize_checkpoint(
        folder,
        target,
        scheme=Scheme.parse("w8a16-sym-g32"),
        output_format="gptq",
        ignore=list(ignore),
        quality_windows=0,
        progress=False,
    )
    return target


def test_codes_of_keys_and_values_stay_in_one_tensor(model_of, tmp_path):
    """They are packed along the latents; keys by head are stored the other way round."""
    source = quantized(model_of("v2 lite"), tmp_path / "gptq")
    file = tmp_path / "model.gguf"
    export_gguf(source, file)
    gguf = read_gguf(file)
    assert gguf.tensors["blk.1.attn_kv_b.weight"].type.name == "Q8_0"
    assert not any("attn_k_b" in key for key in gguf.tensors)
    assert gguf.metadata["deepseek2.attention.head_count_kv"] == 4
    assert relative(logits(file), logits(source)) < 1e-5


def test_float_keys_and_values_of_a_quantized_model_are_split(model_of, tmp_path):
    source = quantized(model_of("v3"), tmp_path / "gptq", ignore=["re:.*kv_b_proj"])
    file = tmp_path / "model.gguf"
    export_gguf(source, file)
    gguf = read_gguf(file)
    assert gguf.tensors["blk.0.attn_k_b.weight"].type.name in ("F32", "F16")
    assert gguf.tensors["blk.0.attn_q_b.weight"].type.name == "Q8_0"
    assert relative(logits(file), logits(source)) < 1e-5


def test_blocks_are_unchanged_in_written_file(model_of, tmp_path):
    file = write(model_of("v3"), tmp_path / "model.gguf", Q8_0)
    export_gguf(file, tmp_path / "again.gguf")
    first, again = (read_gguf(each) for each in (file, tmp_path / "again.gguf"))
    assert again.tensors["blk.1.attn_k_b.weight"].type.name == "Q8_0"
    assert first.tensors.keys() == again.tensors.keys()
    assert torch.equal(logits(file), logits(tmp_path / "again.gguf"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rope_interleave": False}, "rope_interleave: expected true"),
        (
            {"rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}},
            "mscale: expected mscale_all_dim, 1.0, found 0.5",
        ),
    ],
)
def test_model_unsupported_by_gguf_is_refused(model_of, tmp_path, changed, words):
    folder = edited(model_of("v3"), tmp_path / "x", config=lambda config: config.update(changed))
    with pytest.raises(InputError, match=words):
        export_gguf(folder, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
