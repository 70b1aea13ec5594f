"""Values of the row of Kimi Linear in families.py: Kimi Delta Attention and latent attention.

The mixer's small linears compute gates: the decay of each key channel (`f_a_proj`, `f_b_proj`), the
strength of a token's update (`b_proj`), and the output gate (`g_a_proj`, `g_b_proj`). They stay in
float.
"""

from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.experts import SharedExpert
from formats.architecture.projection import Projection
from formats.architecture.rows.latent_parts import LATENT
from formats.architecture.rows.parts import GROUPED_ROUTER, NAMES, experts, gated
from formats.architecture.states.mixer import StateMixer, StateTensor

_INNER, _HEADS, _DIM, _C = (
    (name,) for name in ("kda", "linear_num_heads", "linear_head_dim", "hidden_size")
)
_GATES = {
    "f_a": ("f_a_proj", (_DIM, _C)),
    "f_b": ("f_b_proj", (_INNER, _DIM)),
    "g_a": ("g_a_proj", (_DIM, _C)),
    "g_b": ("g_b_proj", (_INNER, _DIM)),
    "b": ("b_proj", (_HEADS, _C)),
}


def _gates(name: str, *keys: str) -> Projection:
    """Return a projection of some of these linears, which share an input."""
    inputs = _GATES[keys[0]][1][1][0]
    members = tuple((f"self_attn.{_GATES[key][0]}", _GATES[key][1][0][0]) for key in keys)
    return Projection(name=f"self_attn.{name}", members=members, inputs=inputs)


KIMI_DELTA = StateMixer(
    kind="Kimi delta attention",
    module="self_attn",
    inputs=Projection(
        name="self_attn.kda_qkv_proj",
        members=tuple((f"self_attn.{x}_proj", "kda") for x in "qkv"),
        inputs="hidden_size",
    ),
    gate_linears=(
        _gates("kda_low_proj", "f_a", "g_a", "b"),
        _gates("f_b_proj", "f_b"),
        _gates("g_b_proj", "g_b"),
    ),
    out=Projection(
        name="self_attn.o_proj",
        members=(("self_attn.o_proj", "hidden_size"),),
        inputs="kda",
        split="inputs",
    ),
    others=(
        *(
            StateTensor(
                key=f"conv_weight_{x}",
                name=f"{x}_conv1d.weight",
                shape=(_INNER, ("one",), ("linear_conv_kernel_dim",)),
            )
            for x in "qkv"
        ),
        StateTensor(
            key="a_log",
            name="A_log",
            shape=(("one",), ("one",), _HEADS, ("one",)),
            float32=True,
            axis=2,
        ),
        StateTensor(key="dt_bias", name="dt_bias", shape=(_INNER,), float32=True),
        StateTensor(key="norm", name="o_norm.weight", shape=(_DIM,), of_heads=False),
        *(
            StateTensor(key=key, name=f"{name}.weight", shape=shape, of_heads=shape[0] != _DIM)
            for key, (name, shape) in _GATES.items()
        ),
    ),
)
_MODULE = "block_sparse_moe"


def _with_experts(norms: tuple[Norm, ...]) -> tuple[Norm, ...]:
    first, second, *others = norms
    return (first, Norm(name=second.name, feeds=_MODULE), *others)


KIMI_LINEAR: dict[str, Any] = {
    **LATENT,
    "builder": "hybrid.kimi_linear",
    "state_mixer": KIMI_DELTA,
    "norms": _with_experts(LATENT["norms"]),
    "experts": experts(
        _MODULE,
        ("w1", "w3", "w2"),
        "moe_intermediate_size",
        GROUPED_ROUTER,
        shared=SharedExpert(**gated(f"{_MODULE}.shared_experts", *NAMES, "shared_experts")),
        types_key="mlp_layer_types",
    ),
    "rope": "none",
    "interleaved_rope": False,
    "float_linears": tuple(f"self_attn.{name}" for name, _ in _GATES.values()),
    "names_in_transformers": {
        f"self_attn.{name}": f"self_attn.forget_gate.{name}"
        for name in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")
    },
    "joined_in_transformers": {
        "self_attn.conv1d.weight": tuple(f"self_attn.{x}_conv1d.weight" for x in "qkv"),
    },
    "draft_layers_key": "",
    "config_keys": {
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
    "fixed": {
        "attention_bias": False,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "mla_use_nope": True,
    },
    "variants": tuple(
        (flag, {**different, "norms": _with_experts(different["norms"])})
        for flag, different in LATENT["variants"]
    ),
}
