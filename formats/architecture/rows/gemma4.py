"""Values of the row of Gemma 4 in families.py."""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import LayerInputs, Norm
from formats.architecture.experts import Router
from formats.architecture.projection import Projection
from formats.architecture.rows.parts import (
    GEMMA,
    GEMMA_NORMS,
    HEAD_NORMS,
    NAMES,
    O_PROJ,
    QKV,
    experts,
)

_WIDTH = "hidden_size_per_layer_input"
_INPUT_NORM = "post_per_layer_input_norm"
_NORMS = (
    *GEMMA_NORMS,
    # with experts: norms after the dense feed-forward, and before and after the experts
    *(
        Norm(name=f"{name}_feedforward_layernorm_{number}", present="enable_moe_block")
        for name, number in (("post", 1), ("pre", 2), ("post", 2))
    ),
    Norm(name=_INPUT_NORM, present=_WIDTH),
)
_EXPERTS = experts(
    "",
    NAMES,
    "moe_intermediate_size",
    Router(
        name="router.proj",
        is_linear=True,
        normalized=True,
        input_scale="router.scale",
        expert_scale="router.per_expert_scale",
    ),
    with_dense=True,
    stacks_only=True,
)
LAYER_INPUTS = LayerInputs(
    width_key=_WIDTH,
    table="model.embed_tokens_per_layer.weight",
    model_projection="model.per_layer_model_projection",
    model_norm="model.per_layer_projection_norm.weight",
    gate=Projection(
        name="per_layer_input_gate",
        members=(("per_layer_input_gate", _WIDTH),),
        inputs="hidden_size",
    ),
    projection=Projection(
        name="per_layer_projection",
        members=(("per_layer_projection", "hidden_size"),),
        inputs=_WIDTH,
    ),
    norm=_INPUT_NORM,
)
_FIXED = {"use_bidirectional_attention": (None, "vision")}  # "vision": within images
GEMMA_4: dict[str, Any] = {
    **{name: value for name, value in GEMMA.items() if name not in ("norm_offset", "rules")},
    "norms": (*_NORMS, *HEAD_NORMS),
    "value_norm": True,
    "layer_scalar": "layer_scalar",
    "full_layers": {
        "qkv": replace(
            QKV,
            members=tuple((name, f"global_{size}") for name, size in QKV.members),
            bias="attention_bias",
        ),
        "o": replace(O_PROJ, inputs="global_q", bias="attention_bias"),
        "norms": (*_NORMS, *(replace(norm, size="global_head_dim") for norm in HEAD_NORMS)),
    },
    "keys_are_values": "attention_k_eq_v",
    "shared_layers_key": "num_kv_shared_layers",
    "wide_shared": "use_double_wide_mlp",
    "fixed": _FIXED,
    "config_keys": {"num_experts_per_tok": "top_k_experts"},
    "variants": (
        ("enable_moe_block", {"experts": _EXPERTS, "fixed": {**_FIXED, _WIDTH: 0}}),
        (_WIDTH, {"layer_inputs": LAYER_INPUTS}),
    ),
}
