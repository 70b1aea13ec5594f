"""Values of the row of Inkling in families.py.

Attention adds a bias to each score. It depends on the distance of the key, and each head of a query
mixes it from `d_rel` profiles over distances (`rel_logits_proj`), with factors that `r_proj`
computes. Each layer has four short convolutions: of keys, of values, and of the outputs of
attention and feed-forward; each adds its input. The router weighs the shared experts together with
the chosen ones.
"""

from dataclasses import replace
from typing import Any

from formats.architecture.experts import AlwaysActive, Router
from formats.architecture.projection import Projection, Shape
from formats.architecture.rows.parts import (
    HEAD_NORMS,
    NAMES,
    O_PROJ,
    QKV,
    experts,
    norms_before,
)
from formats.architecture.states.mixer import StateMixer, StateTensor

FULL, WINDOW = "hybrid", "hybrid_sliding"  # entries of layer_types
PROFILES = "self_attn.rel_logits_proj.proj"
DENSE_FACTOR = "mlp.global_scale"
_R = "self_attn.r_proj"
_TAPS = ("conv_kernel_size",)


def _convolutions(kind: str) -> StateMixer:
    """Return the convolutions of a layer, whose numbers of KV heads have the prefix `kind`."""
    named = (
        ("k", "self_attn.k_sconv", f"{kind}_kv"),
        ("v", "self_attn.v_sconv", f"{kind}_kv"),
        ("attention", "attn_sconv", "hidden_size"),
        ("mlp", "mlp_sconv", "hidden_size"),
    )
    return StateMixer(
        kind="short convolutions",
        module="",
        inputs=None,
        out=None,
        others=tuple(
            StateTensor(
                key=f"conv_weight_{key}",
                name=f"{name}.conv1d.weight",
                shape=((size,), ("one",), _TAPS),
                float32=True,
                of_heads=False,
            )
            for key, name, size in named
        ),
        parallel_to_attention=True,
    )


def _of_kind(kind: str) -> dict[str, Any]:
    """Return the fields of the layers of one type."""
    members = tuple((name, f"{kind}_{size}") for name, size in QKV.members)
    return {
        "qkv": replace(QKV, members=members),
        "o": replace(O_PROJ, inputs=f"{kind}_q"),
        "head_gates": Projection(
            name=_R,
            members=((_R, f"{kind}_relative"),),
            inputs="hidden_size",
            float_because="computes biases of attention",
        ),
        "state_mixer": _convolutions(kind),
    }


def _profiles(extent: str) -> dict[str, Shape]:
    return {PROFILES: (("d_rel",), (extent,))}


INKLING: dict[str, Any] = {
    "builder": "hybrid.inkling",
    **_of_kind("local"),
    "full_layers": _of_kind("global"),
    "full_type": FULL,
    "kind_tensors": {FULL: _profiles("rel_extent"), WINDOW: _profiles("sliding_window")},
    "dense_tensors": {DENSE_FACTOR: (("one",),)},
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(
            scores="sigmoid",
            normalized=True,
            float32=True,
            correction="gate.e_score_correction_bias",
            factor_key="route_scale",
            scale="gate.global_scale",
        ),
        types_key="mlp_layer_types",
        stacks_only=True,
        always=AlwaysActive(
            count_key="n_shared_experts",
            module="mlp.shared_experts",
        ),
    ),
    "norms": (*norms_before("mlp"), *HEAD_NORMS),
    "embedding_norm": "model.embed_tokens.embed_norm.weight",
    "logits_divisor_key": "logits_mup_width_multiplier",
    "window": "layer_types",
    "rope": "none",
    "draft_prefix": "model.mtp.",
    "fixed": dict.fromkeys(("shared_expert_sink", "use_embed_norm", "use_sconv"), True),
}
