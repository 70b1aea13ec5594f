"""Rows of Laguna and MiMo-V2-Flash, whose layers with a window have other numbers of heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.architecture.experts import Router, SharedExpert
from formats.architecture.family import MAX_LAYERS
from formats.architecture.flags import Equals
from formats.architecture.projection import Projection
from formats.architecture.rows.parts import (
    GROUPED_ROUTER,
    HEAD_NORMS,
    NAMES,
    O_PROJ,
    QKV,
    experts,
    gated,
    norms_before,
)
from formats.architecture.sizes import is_size
from formats.errors import CheckpointError, config_error

_BIAS = "attention_bias"
_Q, _K, _V = (name for name, _ in QKV.members)
_GATES = "self_attn.g_proj"


def _linears(kind: str, *members: tuple[str, str], o: str, o_bias: str | bool) -> dict[str, Any]:
    """Return qkv and o of one layer type."""
    named = tuple((name, f"{kind}_{size}") for name, size in members)
    return {
        "qkv": replace(QKV, members=named, bias=_BIAS),
        "o": replace(O_PROJ, inputs=f"{kind}_{o}", bias=o_bias),
    }


def _gate_of_heads(kind: str) -> Projection:
    return Projection(
        name=_GATES,
        members=((_GATES, f"num_{kind}_attention_heads"),),
        inputs="hidden_size",
        float_because="one output per head, which gates it",
    )


def heads_with_gates(kind: str) -> dict[str, Any]:
    """Return the fields of one layer type, with a gate for each head."""
    members = ((_Q, "q"), (_K, "kv"), (_V, "kv"))
    return _linears(kind, *members, o="q", o_bias=_BIAS) | {"head_gates": _gate_of_heads(kind)}


def _laguna_by_channel(kind: str) -> dict[str, Any]:
    """Return the fields of one layer type, with a gate for each channel."""
    members = ((_Q, "q"), (_GATES, "q"), (_K, "kv"), (_V, "kv"))
    return _linears(kind, *members, o="q", o_bias=_BIAS) | {"head_gates": None}


_FIXED = {"moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False}
LAGUNA: dict[str, Any] = {
    **heads_with_gates("local"),
    "full_layers": heads_with_gates("global"),
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(
            scores="sigmoid",
            normalized=True,
            rounded=True,
            correction="experts.e_score_correction_bias",
            factor_key="moe_routed_scaling_factor",
        ),
        shared=SharedExpert(
            **gated("mlp.shared_expert", *NAMES, "shared_expert_intermediate_size")
        ),
        types_key="mlp_layer_types",
    ),
    "names_in_transformers": {
        "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    },
    "norms": (*norms_before("mlp"), *HEAD_NORMS),
    "window": "layer_types",
    "fixed": _FIXED,
    "variants": (
        (
            Equals("gating", "per-element"),
            {
                **_laguna_by_channel("local"),
                "gated_attention": True,
                "full_layers": _laguna_by_channel("global"),
                "fixed": {**_FIXED, _BIAS: False},  # gates, which are fused with q, have no bias
            },
        ),
    ),
}
_WIDE_KEYS = ((_Q, "q"), (_K, "kv"), (_V, "v"))
MIMO: dict[str, Any] = {
    **_linears("local", *_WIDE_KEYS, o="o", o_bias=False),
    "full_layers": {**_linears("global", *_WIDE_KEYS, o="o", o_bias=False), "sinks": ""},
    "sinks": "self_attn.attention_sink_bias",
    "value_factor_key": "attention_value_scale",
    "experts": experts(
        "mlp", NAMES, "moe_intermediate_size", GROUPED_ROUTER, types_key="mlp_layer_types"
    ),
    "names_in_transformers": {"self_attn.attention_sink_bias": "self_attn.sinks"},
    "norms": norms_before("mlp"),
    "window": "layer_types",
    "draft_prefix": "model.mtp.",
}


def laguna_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' defaults, and the numbers of heads of layers with and without a window.

    Raises CheckpointError if layers of one kind have different numbers of heads.
    """
    count, usual = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not is_size(count):
        return {}
    count = min(count, MAX_LAYERS)
    types = config.get("layer_types") or ["full_attention"] * count
    by_layer = config.get("num_attention_heads_per_layer") or [usual] * count
    for key, each in (("layer_types", types), ("num_attention_heads_per_layer", by_layer)):
        if not isinstance(each, list | tuple):
            raise config_error(key, "a list with an entry for each layer", each)
    found: dict[str, Any] = {"layer_types": types}
    for kind, name in (("full_attention", "global"), ("sliding_attention", "local")):
        heads = {n for n, each in zip(by_layer, types, strict=False) if each == kind}
        if len(heads) > 1:
            raise CheckpointError(
                "config.json num_attention_heads_per_layer",
                f"expected the same number in all layers of the type {kind}, found {heads}",
                "use a model whose layers of one type are alike",
            )
        kv_heads = config.get("num_key_value_heads", 8)
        found |= _known(
            **{f"num_{name}_attention_heads": next(iter(heads), usual)},
            **{f"num_{name}_key_value_heads": kv_heads},
        )
    if config.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = ["dense", *["sparse"] * (count - 1)]
    head_dim = config.get("head_dim", 128)
    return {**found, **_known(head_dim=head_dim, global_head_dim=head_dim)}


def _known(**values: Any) -> dict[str, Any]:
    """Return only the values that are sizes; others are config errors, reported elsewhere."""
    return {key: value for key, value in values.items() if is_size(value)}
