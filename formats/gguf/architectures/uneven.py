"""Architectures whose layers with a window have other heads. Needs no torch."""

import math
from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.layers import REMEDY, by_layer, dense_layers
from formats.gguf.architectures.parts import BEFORE, BY_SIGMOID, EXPERTS, OF_HEADS

_SLIDING = "sliding_attention"


def sparse_layers(metadata: Any, count: int) -> list[str]:
    """Return the type of each layer's feed-forward: layers with a router have experts."""
    routers = (f"blk.{layer}.ffn_gate_inp.weight" for layer in range(count))
    return ["sparse" if each in metadata.gguf.tensors else "dense" for each in routers]


def _mimo_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return MiMo-V2's KV heads and layer types, and RoPE parameters that differ in the base.

    Raises CheckpointError unless layers with a window have twice as many KV heads as others.
    """
    count, kinds = config["num_hidden_layers"], config["layer_types"]
    by_kind: dict[str, set[int]] = {}
    heads = by_layer(metadata, "attention.head_count_kv", count)
    for kind, each in zip(kinds, heads, strict=True):
        by_kind.setdefault(kind, set()).add(each)
    full = by_kind.get("full_attention") or {each // 2 for each in by_kind[_SLIDING]}
    fits = len(full) == 1 and by_kind.get(_SLIDING, {0}) <= {0, 2 * min(full)}
    if not fits:
        raise metadata.wrong(
            "attention.head_count_kv",
            f"expected twice as many in layers with a window, found {heads!r:.60}",
        )
    theta, part = config["rope_theta"], config.get("partial_rotary_factor", 1.0)
    local = float(metadata.number("rope.freq_base_swa", theta))
    usual = {"rope_type": "default", "partial_rotary_factor": part}
    return {
        "num_key_value_heads": full.pop(),
        "mlp_layer_types": sparse_layers(metadata, count),
        "attention_value_scale": metadata.number("attention.value_scale", 1.0),
        "rope_parameters": {
            "full_attention": {**usual, "rope_theta": theta},
            _SLIDING: {**usual, "rope_theta": local},
        },
    }


def _mimo_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return MiMo-V2's KV heads by layer. Raises CheckpointError for other RoPE parameters."""
    ropes = config.get("rope_parameters") or {}
    kinds = {(each.get("rope_type"), each.get("partial_rotary_factor")) for each in ropes.values()}
    if len(kinds) != 1 or kinds.pop()[0] != "default":
        raise CheckpointError(
            "config.json rope_parameters",
            "expected rope_type default and one partial_rotary_factor, as in llama.cpp",
            REMEDY,
        )
    heads = config["num_key_value_heads"]
    scale = config.get("attention_value_scale")
    return {
        "attention.head_count_kv": [
            2 * heads if kind == _SLIDING else heads for kind in config["layer_types"]
        ],
        "attention.value_scale": 1.0 if scale is None else float(scale),
    }


def _laguna_gating(metadata: Any) -> Mapping[str, Any]:
    """Return whether Laguna gates heads or channels: by the width of the first layer's gates."""
    gates = metadata.gguf.tensors.get("blk.0.attn_gate.weight")
    heads = by_layer(metadata, "attention.head_count", 1)[0]
    is_by_head = gates is None or gates.shape[0] == heads
    return {"gating": True if is_by_head else "per-element"}


def _laguna_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Laguna's heads and layer types, and the RoPE parameters of each type."""
    count, theta = config["num_hidden_layers"], config["rope_theta"]
    kinds, every = config["layer_types"], metadata.get("attention.sliding_window_pattern")
    if config["sliding_window"] and not isinstance(every, list | bool):
        kinds = [_SLIDING if i % (every or 4) else "full_attention" for i in range(count)]
    width = config["head_dim"]
    usual = {"rope_type": "default", **config.get("rope_scaling", {})}
    local_width = metadata.size("rope.dimension_count_swa", width)
    if local_width > width:
        raise metadata.wrong("rope.dimension_count_swa", f"exceeds head_dim, {width}")
    full = {
        **usual,
        "rope_theta": theta,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }
    sliding = {
        "rope_type": "default",
        "rope_theta": float(metadata.number("rope.freq_base_swa", theta)),
        "partial_rotary_factor": local_width / width,
    }
    ropes = {"full_attention": full, _SLIDING: sliding}
    return {
        **_laguna_gating(metadata),
        "layer_types": kinds,
        "num_attention_heads_per_layer": by_layer(metadata, "attention.head_count", count),
        "mlp_layer_types": sparse_layers(metadata, count),
        "rope_parameters": ropes,
        # the older key, where it is stated, takes precedence
        **({"rope_scaling": ropes} if "rope_scaling" in config else {}),
    }


def _laguna_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Laguna's heads by layer, layers without experts, and RoPE channels.

    Raises CheckpointError for RoPE that llama.cpp does not compute.
    """
    ropes = config.get("rope_parameters") or {}
    full, local = ropes.get("full_attention", {}), ropes.get(_SLIDING, {})
    stated = full.get("attention_factor")
    if stated is not None and full.get("rope_type") == "yarn":
        usual = 0.1 * math.log(full["factor"]) + 1
        if not math.isclose(stated, usual, rel_tol=1e-4):
            raise CheckpointError(
                "config.json attention_factor",
                f"expected {usual:.4f}, as llama.cpp computes it, found {stated}",
                REMEDY,
            )
    if local.get("rope_type", "default") != "default":
        raise CheckpointError(
            "config.json rope_parameters",
            f"expected rope_type default in layers with a window, found {local['rope_type']!r:.40}",
            REMEDY,
        )
    count, heads = config["num_hidden_layers"], config["num_attention_heads"]
    return {
        "attention.head_count": config.get("num_attention_heads_per_layer") or [heads] * count,
        "leading_dense_block_count": dense_layers(config),
        "rope.dimension_count_swa": int(
            config["head_dim"] * local.get("partial_rotary_factor", 1.0)
        ),
    }


UNEVEN = (
    Architecture(
        name="laguna",
        family="LagunaForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        keys={
            **EXPERTS,
            "num_experts": "expert_count",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "moe_routed_scaling_factor": "expert_weights_scale",
        },
        fixed={"attention_bias": False, "moe_routed_scaling_factor": 1.0},
        constants={**BY_SIGMOID, "expert_weights_norm": True},
        window="pattern",
        pattern=4,
        sizes_by_layer=True,
        uncompared=("rope_parameters",),
        stated=_laguna_gating,
        more_config=_laguna_config,
        more_metadata=_laguna_metadata,
    ),
    Architecture(
        name="mimo2",
        family="MiMoV2FlashForCausalLM",
        keys={**EXPERTS, "n_routed_experts": "expert_count"},
        # llama.cpp adds no biases, and has neither groups nor a factor of experts
        fixed={
            **{"attention_bias": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            "routed_scaling_factor": 1.0,
        },
        value_width="v_head_dim",
        window="pattern",
        pattern=6,
        sizes_by_layer=True,
        uncompared=("rope_parameters",),
        more_config=_mimo_config,
        more_metadata=_mimo_metadata,
        head="own",
    ),
)
