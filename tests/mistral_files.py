"""Writer of Mistral's format: params.json, consolidated.safetensors and tekken.json from the files
that transformers writes. It shares no code with the reader."""

import base64
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Folders made from Mistral's format are in a folder of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]"),
    "[/MODEL_SETTINGS]",
]
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
# transformers' name of a module in a layer -> Mistral's
LAYER = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.shared_experts.gate_proj": "shared_experts.w1",
    "mlp.shared_experts.down_proj": "shared_experts.w2",
    "mlp.shared_experts.up_proj": "shared_experts.w3",
    "mlp.gate": "gate",
    "block_sparse_moe.gate": "feed_forward.gate",
}
TOWER_LAYER = {
    "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv",
    "attention.o_proj": "attention.wo",
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.down_proj": "feed_forward.w2",
    "feed_forward.up_proj": "feed_forward.w3",
}
OUTSIDE = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "multi_modal_projector.norm": "pre_mm_projector_norm",
    "multi_modal_projector.linear_1": "vision_language_adapter.w_in",
    "multi_modal_projector.linear_2": "vision_language_adapter.w_out",
    "multi_modal_projector.patch_merger.merging_layer": "patch_merger.merging_layer",
}
FLOAT8_FIELDS = {"weight_scale_inv": "qscale_weight", "activation_scale": "qscale_act"}


def mistral_name(name: str) -> str:
    """Return Mistral's name of a tensor that transformers has written."""
    module, _, field = name.rpartition(".")
    field = FLOAT8_FIELDS.get(field, field)
    module = module.removeprefix("language_model.").replace("model.language_model.", "model.")
    if module.startswith("model.") and ("vision_tower" in module or "projector" in module):
        module = module.removeprefix("model.")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{field}"
    if module.startswith("vision_tower."):
        parts = module.removeprefix("vision_tower.").split(".")
        if parts[0] != "transformer":
            return f"vision_encoder.{'.'.join(parts)}.{field}"
        leaf = ".".join(parts[3:])
        return f"vision_encoder.transformer.layers.{parts[2]}.{TOWER_LAYER.get(leaf, leaf)}.{field}"
    _, _, number, *rest = module.split(".")
    if "experts" in rest and rest[1] == "experts":
        leaf = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.get(rest[3], rest[3])
        below = "feed_forward." if rest[0] == "block_sparse_moe" else ""
        return f"layers.{number}.{below}experts.{rest[2]}.{leaf}.{field}"
    return f"layers.{number}.{LAYER['.'.join(rest)]}.{field}"


def experts_apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with a tensor for each expert instead of one for all."""
    found = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if not module.endswith(".experts"):
            found[name] = tensor
            continue
        for number, own in enumerate(tensor):
            parts = {"down_proj": own}
            if leaf == "gate_up_proj":
                gate, up = own.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            found |= {f"{module}.{number}.{part}.weight": each for part, each in parts.items()}
    return found


def as_pairs(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return rows with the channels that are rotated together next to each other."""
    found = torch.empty_like(tensor)
    half = head_dim // 2
    for head in range(len(tensor) // head_dim):
        own = tensor[head * head_dim : (head + 1) * head_dim]
        for channel in range(half):
            found[head * head_dim + 2 * channel] = own[channel]
            found[head * head_dim + 2 * channel + 1] = own[channel + half]
    return found


def params_of(config: dict) -> dict:
    """Return params.json for a config.json of transformers."""
    text = config.get("text_config", config)
    rope = text["rope_parameters"]
    params = {
        "dim": text["hidden_size"],
        "n_layers": text["num_hidden_layers"],
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "hidden_dim": text["intermediate_size"],
        "norm_eps": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"],
        "rope_theta": rope["rope_theta"],
        "max_position_embeddings": text["max_position_embeddings"],
        "tied_embeddings": text["tie_word_embeddings"],
    }
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        params["yarn"] = {
            "factor": rope["factor"],
            "original_max_position_embeddings": length,
            "beta": rope.get("beta_fast", 32),
            "alpha": rope.get("beta_slow", 1),
            "apply_scale": rope.get("attention_factor") != 1.0,
        }
        if rope.get("llama_4_scaling_beta"):
            params["llama_4_scaling"] = {
                "beta": rope["llama_4_scaling_beta"],
                "original_max_position_embeddings": length,
            }
    if "kv_lora_rank" in text:
        keys = ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
        params |= {key: text[key] for key in keys}
        params["head_dim"] = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        params["moe"] = {
            "num_experts": text["n_routed_experts"],
            "num_experts_per_tok": text["num_experts_per_tok"],
            "expert_hidden_dim": text["moe_intermediate_size"],
            "num_shared_experts": text["n_shared_experts"],
            "first_k_dense_replace": text["first_k_dense_replace"],
            "num_expert_groups": text["n_group"],
            "num_expert_groups_per_tok": text["topk_group"],
            "routed_scale": text["routed_scaling_factor"],
            "route_every_n": 1,
        }
    else:
        params["head_dim"] = text.get("head_dim") or params["dim"] // params["n_heads"]
    if "num_local_experts" in text and "kv_lora_rank" not in text:
        keys = ("num_experts_per_tok",)
        params["moe"] = {key: text[key] for key in keys}
        params["moe"]["num_experts"] = text["num_local_experts"]
    window = text.get("sliding_window")
    kinds = text.get("layer_types")
    if window and kinds and "full_attention" in kinds:
        params["sliding_window"] = [window if kind != "full_attention" else None for kind in kinds]
    elif window:
        params["sliding_window"] = window
    vision = config.get("vision_config")
    if vision:
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        keys += ("image_size", "patch_size", "num_channels")
        params["vision_encoder"] = {
            **{key: vision[key] for key in keys},
            "rope_theta": vision["rope_parameters"]["rope_theta"],
            "max_image_size": vision["image_size"],
            "adapter_bias": config["multimodal_projector_bias"],
            "image_token_id": 10,
            "image_break_token_id": 12,
            "image_end_token_id": 13,
        }
        if "spatial_merge_size" in config:
            params["vision_encoder"] |= {
                "mm_projector_id": "patch_merge",
                "spatial_merge_size": config["spatial_merge_size"],
                "add_pre_mm_projector_layer_norm": True,
            }
    return params


def write_mistral(source: Path, target: Path, num_files: int = 1, **changes: object) -> Path:
    """Write a folder of transformers' files in Mistral's format. `changes`: keys of params.json."""
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    params = params_of(config)
    vision = config.get("vision_config", {"hidden_size": 0, "num_attention_heads": 1})
    tower_dim = vision["hidden_size"] // vision["num_attention_heads"]
    state = {}
    for name, tensor in experts_apart(load_file(source / "model.safetensors")).items():
        own = mistral_name(name)
        if own.rpartition(".")[0].endswith((".wq", ".wk")):
            head_dim = tower_dim if own.startswith("vision_encoder.") else params["head_dim"]
            if tensor.ndim and len(tensor) > 1:
                tensor = as_pairs(tensor, head_dim)
        state[own] = tensor.contiguous()
    names = sorted(state)
    files = [names[number::num_files] for number in range(num_files)]
    weight_map = {}
    for number, own in enumerate(files, 1):
        name = f"consolidated-{number:05d}-of-{num_files:05d}.safetensors"
        name = "consolidated.safetensors" if num_files == 1 else name
        save_file({each: state[each] for each in own}, target / name)
        weight_map |= dict.fromkeys(own, name)
    if num_files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (target / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    (target / "params.json").write_text(json.dumps({**params, **changes}))
    return target


def tekken_of(size: int, version: str = "v7") -> dict:
    """Return a tekken.json with `size` ids: special tokens, all bytes, and pairs of tokens."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = (" the", " page", "table", "ing", " what", "look", " is", "é", " 東京", "12", "  ")
    for word in words:
        data = word.encode()
        tokens += [data[:end] for end in range(2, len(data) + 1) if data[:end] not in tokens]
    number = 0
    while len(tokens) < size:  # tokens of letters that no text of a test has
        token = bytes([200 + number // 55, 200 + number % 55])
        tokens += [token] if token not in tokens else []
        number += 1
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)
    ]
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(vocab),
            "default_vocab_size": size,
            "default_num_special_tokens": 40,
            "version": version,
        },
        "vocab": vocab,
        "special_tokens": special,
    }


def write_tekken(folder: Path, size: int, version: str = "v7") -> None:
    (folder / "tekken.json").write_text(json.dumps(tekken_of(size, version)))
