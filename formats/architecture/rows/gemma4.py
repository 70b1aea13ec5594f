"""Values of the row of Gemma 4 in families.py."""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.experts import Router
from formats.architecture.rows.parts import (
    GEMMA,
    GEMMA_NORMS,
    HEAD_NORMS,
    NAMES,
    O_PROJ,
    QKV,
    experts,
)

_Q, _K, _ = QKV.members
# With experts: after the dense feed-forward, and before and after the experts.
_NORMS = (
    *GEMMA_NORMS,
    *(
        Norm(name=f"{name}_feedforward_layernorm_{number}", present="enable_moe_block")
        for name, number in (("post", 1), ("pre", 2), ("post", 2))
    ),
)
GEMMA_4: dict[str, Any] = {
    **{name: value for name, value in GEMMA.items() if name not in ("norm_offset", "rules")},
    "norms": (*_NORMS, *HEAD_NORMS),
    "value_norm": True,
    "layer_scalar": "layer_scalar",
    "full_layers": {  # keys are the values, too
        "qkv": replace(
            QKV, members=((_Q[0], "global_q"), (_K[0], "global_kv")), bias="attention_bias"
        ),
        "o": replace(O_PROJ, inputs="global_q", bias="attention_bias"),
        "norms": (*_NORMS, *(replace(norm, size="global_head_dim") for norm in HEAD_NORMS)),
    },
    "fixed": {
        **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        "attention_k_eq_v": True,
        "use_bidirectional_attention": (None, "vision"),  # the latter: within images
    },
    "config_keys": {"num_experts_per_tok": "top_k_experts"},
}
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
)
GEMMA_4["variants"] = (("enable_moe_block", {"experts": _EXPERTS}),)
