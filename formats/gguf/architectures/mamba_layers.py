"""Functions of rows with Mamba-2: Granite 4, Bamba, Nemotron-H, Falcon-H1.

Functions of `more_config` read metadata, those of `more_metadata` write them. Needs no torch.
"""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.layers import (
    REMEDY,
    STATE_SIZES,
    by_kv_heads,
    by_layer,
    check_sizes,
    kv_heads_metadata,
)


def mamba_inner(config: Mapping[str, Any]) -> int:
    """Return the width of Mamba-2's heads in all."""
    return config["mamba_n_heads"] * config["mamba_d_head"]


def mamba_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Granite's layer types, and the width of Mamba-2's heads."""
    *_, heads = check_sizes(metadata, *STATE_SIZES)
    width, rest = divmod(metadata.size("ssm.inner_size"), heads)
    if rest:
        raise metadata.wrong("ssm.inner_size", f"expected {heads} heads of one width")
    rotates = metadata.get("rope.scaling.finetuned")
    found = {
        "mamba_d_head": width,
        "position_embedding_type": "rope" if rotates is None or rotates else "nope",
    }
    if config.get("num_local_experts") is None:
        found["num_local_experts"] = 0
    return {**by_kv_heads("linear_attention")(metadata, config), **found}


def mamba_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Granite's layer types, and the width of all of Mamba-2's heads."""
    return {
        **kv_heads_metadata("linear_attention")(config),
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
    }


def bamba_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Bamba's layers with attention, and the width of Mamba-2's heads."""
    *_, heads = check_sizes(metadata, *STATE_SIZES)
    if metadata.get("rope.scaling.finetuned") is False:
        raise metadata.wrong("rope.scaling.finetuned", "expected true, as in Bamba")
    width, rest = divmod(metadata.size("ssm.inner_size"), heads)
    if rest:
        raise metadata.wrong("ssm.inner_size", f"expected {heads} heads of one width")
    kv_heads = by_layer(metadata, "attention.head_count_kv", config["num_hidden_layers"])
    attends = [layer for layer, each in enumerate(kv_heads) if each]
    return {"attn_layer_indices": attends, "mamba_d_head": width}


def bamba_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Bamba's layers with attention, by their KV heads, and that heads have RoPE."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    attends, layers = config.get("attn_layer_indices") or (), range(config["num_hidden_layers"])
    return {
        "attention.head_count_kv": [heads if layer in attends else 0 for layer in layers],
        "ssm.inner_size": mamba_inner(config),
        "rope.scaling.finetuned": True,
    }


def nemotron_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the one block of each of Nemotron-H's layers, and the width of Mamba-2's heads."""
    count = config["num_hidden_layers"]
    check_sizes(metadata, *STATE_SIZES)
    heads, widths = (
        by_layer(metadata, key, count) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    wide = "moe" if metadata.get("expert_count") else "mlp"
    kinds = [
        wide if width else "full_attention" if each else "linear_attention"
        for each, width in zip(heads, widths, strict=True)
    ]
    inner = metadata.size("ssm.inner_size") // metadata.size("ssm.time_step_rank")
    found = {"layer_types": kinds, "layers_block_type": kinds, "mamba_d_head": inner}
    if wide == "moe":
        found["mlp_layer_types"] = ["sparse" if kind == "moe" else "dense" for kind in kinds]
    return found


def nemotron_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the one block of each layer: by its KV heads, and the width of its feed-forward."""
    kinds, heads = config["layer_types"], config["num_key_value_heads"]
    wide = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [wide if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.layer_norm_epsilon": float(config["layer_norm_epsilon"]),
        "ssm.inner_size": mamba_inner(config),
    }


# Falcon-H1's factors, which files have in the weights
FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)


def falcon_h1_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of Falcon-H1's mixers, and factors of 1: they are in the weights."""
    *_, heads = check_sizes(metadata, *STATE_SIZES)
    inner = metadata.size("ssm.inner_size")
    has_norm = "blk.0.ssm_norm.weight" in metadata.gguf.tensors
    return {
        **dict.fromkeys(FACTORS, 1.0),
        **{"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0, 1.0]},
        **{"mamba_d_ssm": inner, "mamba_d_head": inner // heads, "mamba_rms_norm": has_norm},
    }


def falcon_h1_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of Falcon-H1's mixers. Raises CheckpointError for a norm before gates."""
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise CheckpointError(
            "config.json mamba_norm_before_gate", "expected false, as in llama.cpp", REMEDY
        )
    return {"ssm.inner_size": mamba_inner(config)}


def falcon_h1_factors(theirs: str, config: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return factors of the rows of a tensor, each with its number of rows; 0: all."""
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    attention = config.get("attention_in_multiplier", 1.0)
    factors = {
        "token_embd": config.get("embedding_multiplier", 1.0),
        "output": config.get("lm_head_multiplier", 1.0),
        **{"ffn_gate": gate, "ffn_down": down, "attn_q": attention, "attn_v": attention},
        "attn_k": attention * config.get("key_multiplier", 1.0),
        "attn_output": config.get("attention_out_multiplier", 1.0),
        "ssm_out": config.get("ssm_out_multiplier", 1.0),
    }
    if theirs != "ssm_in":
        return [(0, factors.get(theirs, 1.0))]
    inner, states = mamba_inner(config), config["mamba_n_groups"] * config["mamba_d_state"]
    rows = (inner, inner, states, states, config["mamba_n_heads"])
    each = config.get("ssm_multipliers") or [1.0] * 5
    factor = config.get("ssm_in_multiplier", 1.0)
    return [(count, own * factor) for count, own in zip(rows, each, strict=True)]
