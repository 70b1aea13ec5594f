"""Latent attention in GGUF's form: metadata, and kv_b_proj by head in two tensors.

This is llama.cpp's architecture deepseek2. A quantized kv_b_proj keeps its codes in one tensor,
attn_kv_b, as in older files: the keys are stored transposed in the two-tensor form and would need
other codes. Legend: H heads, L latent, P width of keys without RoPE, V width of values.
"""

from collections.abc import Mapping
from typing import Any

import torch

from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.layers import REMEDY, dense_layers
from formats.gguf.architectures.parts import SIGMOID, SOFTMAX
from formats.gguf.writing.container_writer import Value


def latent_metadata(
    config: Mapping[str, Any], row: Architecture, *, is_split: bool
) -> dict[str, Value]:
    """Return the metadata of latent attention and of its experts.

    `is_split`: the file has attn_k_b, and its KV cache has one head of latents. Raises
    CheckpointError if GGUF cannot express a key of config.json.
    """
    if not config.get("rope_interleave", True):
        raise CheckpointError(
            "config.json rope_interleave", "expected true, which GGUF assumes", REMEDY
        )
    nope, rope, values, rank = (
        config[key]
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    widths = {"key_length": nope + rope, "value_length": values}
    if is_split:
        widths = {f"{key}_mla": width for key, width in widths.items()}
        widths |= {"key_length": rank + rope, "value_length": rank}
    found: dict[str, int] = {f"attention.{key}": width for key, width in widths.items()}
    found["attention.head_count_kv"] = 1 if is_split else config["num_attention_heads"]
    found["rope.dimension_count"] = rope
    if config.get("q_lora_rank"):
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    keys = {key: Value(type="u32", value=value) for key, value in found.items()}
    return keys | _of_experts(config, row) | _yarn(config)


def _of_experts(config: Mapping[str, Any], row: Architecture) -> dict[str, Value]:
    """Return the metadata of experts, which llama.cpp also reads for models without experts."""
    if not config.get("n_routed_experts"):
        if not row.without_experts:
            return {}
        found = {
            "leading_dense_block_count": config["num_hidden_layers"],
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_shared_count": 0,
        }
        return {key: Value(type="u32", value=value) for key, value in found.items()}
    found = {"leading_dense_block_count": dense_layers(config)}
    kind = config["model_type"]
    by_sigmoid = kind not in ("deepseek_v2", "mistral4")
    found["expert_gating_func"] = SIGMOID if by_sigmoid else SOFTMAX
    keys = {key: Value(type="u32", value=value) for key, value in found.items()}
    if "norm_topk_prob" not in config:
        keys["expert_weights_norm"] = Value(type="bool", value=kind != "deepseek_v2")
    return keys


def split_by_head(
    weight: torch.Tensor, config: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split kv_b_proj [H (P + V), L] into keys [H, L, P] and values [H, V, L]."""
    by_head = weight.unflatten(0, (config["num_attention_heads"], -1))
    keys, values = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    return keys.transpose(1, 2).contiguous(), values.contiguous()


def _yarn(config: Mapping[str, Any]) -> dict[str, Value]:
    """Return DeepSeek's YaRN factor, which files state as one tenth of mscale_all_dim."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return {}
    if factor != every or not every:
        raise CheckpointError(
            "config.json mscale",
            f"expected mscale_all_dim, {every}, found {factor}: GGUF states one number",
            REMEDY,
        )
    return {"rope.scaling.yarn_log_multiplier": Value(type="f32", value=0.1 * every)}
