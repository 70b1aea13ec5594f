"""Values of the row of Step-3.5 in families.py, which Step-3.7 has as its text model.

Sliding-window layers have other numbers of heads, as in Laguna. Each head has a gate. The last
layers clamp the results of their activation functions.
"""

from collections.abc import Mapping
from typing import Any

from formats.architecture.experts import Router, SharedExpert
from formats.architecture.family import MAX_LAYERS
from formats.architecture.rows.parts import HEAD_NORMS, NAMES, experts, gated, norms_before
from formats.architecture.rows.uneven import heads_with_gates
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.parts import known_sizes
from formats.errors import CheckpointError

_MODULE = "moe"
_OTHER = "attention_other_setting"
STEP: dict[str, Any] = {
    **heads_with_gates("local"),
    "full_layers": heads_with_gates("global"),
    "gate_activation": "sigmoid",
    "experts": experts(
        _MODULE,
        NAMES,
        "moe_intermediate_size",
        Router(
            scores="sigmoid",
            normalized=True,
            float32=True,
            correction="router_bias",
            factor_key="moe_router_scaling_factor",
        ),
        shared=SharedExpert(**gated("share_expert", *NAMES, "shared_expert_intermediate_size")),
        types_key="mlp_layer_types",
        stacks=tuple(f"{_MODULE}.{name}.weight" for name in NAMES),
        stacks_only=True,
        limits_key="swiglu_limits",
    ),
    "limits_key": "swiglu_limits_shared",
    "norms": (*norms_before(_MODULE), *HEAD_NORMS),
    "norm_offset": 1.0,
    "float32_norms": True,
    "window": "layer_types",
    "class_in_transformers": "Step3p7TextModel",
    "names_in_transformers": {
        f"{_MODULE}.router_bias": f"{_MODULE}.gate.e_score_correction_bias",
        "share_expert": f"{_MODULE}.shared_experts",
    },
    "config_keys": {
        "num_key_value_heads": "num_attention_groups",
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "shared_expert_intermediate_size": "share_expert_dim",
    },
    "unread_layers_key": "num_nextn_predict_layers",
    # transformers reads none of these keys: it always computes this
    "fixed": {
        **{"att_impl_type": "GQA", "zero_centered": True, "sink": False},
        **{"use_head_wise_attn_gate": True, "use_moe_router_bias": True},
        **{"norm_expert_weight": True, "moe_router_activation": "sigmoid"},
        **{"mlp_bias": False, "use_rope_layers": ([], None)},
        "yarn_only_types": (["full_attention"], None),
    },
}
# lists with an entry for each layer, of MTP layers, too
_LISTS = ("layer_types", "swiglu_limits", "swiglu_limits_shared")


def step_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types and their heads; published files list MTP layers with the others.

    Raises CheckpointError for heads that transformers does not compute.
    """
    count, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not is_size(count):
        return {}
    count, found = min(count, MAX_LAYERS), {}
    for key in _LISTS:
        if isinstance(config.get(key), list):
            found[key] = config[key][:count]
    if found.get("layer_types") is None:
        found["layer_types"] = ["full_attention"] * count
    if config.get("mlp_layer_types") is None:
        stated = config.get("moe_layers_enum")
        sparse = _numbers(stated) if stated is not None else set(range(3, count))
        found["mlp_layer_types"] = [("dense", "sparse")[i in sparse] for i in range(count)]
    other = config.get(_OTHER)
    other = other if isinstance(other, Mapping) else {}
    head_dim, kv_heads = config.get("head_dim", 128), config.get("num_key_value_heads", 8)
    for place, key, usual in (
        (other, "num_attention_groups", kv_heads),
        (other, "head_dim", head_dim),
        (other, "attention_type", "sliding_attention"),
        (config, "query_pre_attn_scalar", head_dim),
    ):
        if place.get(key) not in (None, usual):
            raise CheckpointError(
                f"config.json {_OTHER}.{key}" if place is other else f"config.json {key}",
                f"expected {usual}, found {place[key]!r:.80}",
                "use a model whose layers differ only in their attention heads",
            )
    local = config.get("num_sliding_attention_heads") or other.get("num_attention_heads") or heads
    return {
        **found,
        **known_sizes(
            num_sliding_attention_heads=local,
            num_local_attention_heads=local,
            num_global_attention_heads=heads,
            num_local_key_value_heads=kv_heads,
            num_global_key_value_heads=kv_heads,
            head_dim=head_dim,
            global_head_dim=head_dim,
        ),
    }


def _numbers(stated: Any) -> set[int]:
    """Return the numbers of a list, or of a text with commas. Raises CheckpointError."""
    items = stated.split(",") if isinstance(stated, str) else stated
    try:
        return {int(item) for item in items if str(item).strip()}
    except (TypeError, ValueError):
        raise CheckpointError(
            "config.json moe_layers_enum",
            f"expected numbers of layers, found {stated!r:.80}",
            "copy it from the float model",
        ) from None
