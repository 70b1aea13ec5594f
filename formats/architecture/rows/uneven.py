"""Values of the rows of Laguna and MiMo-V2-Flash, whose layers with a window have other heads."""

from dataclasses import replace
from typing import Any

from formats.architecture.experts import Router, SharedExpert
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

_BIAS = "attention_bias"
_Q, _K, _V = (name for name, _ in QKV.members)
_GATES = "self_attn.g_proj"


def _linears(kind: str, *members: tuple[str, str], o: str, o_bias: str | bool) -> dict[str, Any]:
    """Return qkv and o of one kind of layers."""
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


def _laguna(kind: str) -> dict[str, Any]:
    """Return what layers of one kind have, with a gate for each head."""
    members = ((_Q, "q"), (_K, "kv"), (_V, "kv"))
    return _linears(kind, *members, o="q", o_bias=_BIAS) | {"head_gates": _gate_of_heads(kind)}


def _laguna_by_channel(kind: str) -> dict[str, Any]:
    """Return what layers of one kind have, with a gate for each channel."""
    members = ((_Q, "q"), (_GATES, "q"), (_K, "kv"), (_V, "kv"))
    return _linears(kind, *members, o="q", o_bias=_BIAS) | {"head_gates": None}


_FIXED = {"moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False}
LAGUNA: dict[str, Any] = {
    **_laguna("local"),
    "full_layers": _laguna("global"),
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
                "fixed": {**_FIXED, _BIAS: False},  # gates, in one matrix with q, have none
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
