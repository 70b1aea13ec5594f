"""Architectures whose layers with a window have other heads. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.layers import REMEDY, by_layer
from formats.gguf.architectures.parts import EXPERTS

_SLIDING = "sliding_attention"


def _sparse_layers(metadata: Any, count: int) -> list[str]:
    """Return the kinds of feed-forwards: layers with a router have experts."""
    routers = (f"blk.{layer}.ffn_gate_inp.weight" for layer in range(count))
    return ["sparse" if each in metadata.gguf.tensors else "dense" for each in routers]


def _mimo_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return MiMo-V2's KV heads, kinds of layers, and one rotation with two bases.

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
        "mlp_layer_types": _sparse_layers(metadata, count),
        "attention_value_scale": metadata.number("attention.value_scale", 1.0),
        "rope_parameters": {
            "full_attention": {**usual, "rope_theta": theta},
            _SLIDING: {**usual, "rope_theta": local},
        },
    }


def _mimo_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return MiMo-V2's KV heads by layer. Raises CheckpointError for other rotations."""
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


UNEVEN = (
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
