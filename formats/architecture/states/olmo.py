"""Values of the row of OLMo-Hybrid in families.py: gated delta nets, and OLMo 3's attention.

Layers with a net have norms before net and feed-forward, layers with attention norms after both.
"""

from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.projection import Projection
from formats.architecture.rows.parts import GATE_UP, NORMS_AFTER, OLMO, WHOLE_NORMS
from formats.architecture.states.mixer import StateMixer, StateTensor

_HEADS = (("linear_num_value_heads",),)
_SIZES = {"q": "delta_k", "k": "delta_k", "v": "delta_v"}
OLMO_DELTA = StateMixer(
    kind="gated delta nets",
    module="linear_attn",
    inputs=Projection(
        name="linear_attn.in_proj_qkvg",
        members=(
            *((f"linear_attn.{x}_proj", size) for x, size in _SIZES.items()),
            ("linear_attn.g_proj", "delta_v"),
        ),
        inputs="hidden_size",
    ),
    gates=Projection(
        name="linear_attn.in_proj_ba",
        members=tuple((f"linear_attn.{x}_proj", "linear_num_value_heads") for x in "ba"),
        inputs="hidden_size",
        float_because="few outputs, which control what each token writes and forgets",
        apart_elsewhere=True,
    ),
    out=Projection(
        name="linear_attn.o_proj",
        members=(("linear_attn.o_proj", "hidden_size"),),
        inputs="delta_v",
        split="inputs",
    ),
    others=(
        *(
            StateTensor(
                key=f"conv_weight_{x}",
                name=f"{x}_conv1d.weight",
                shape=((size,), ("one",), ("linear_conv_kernel_dim",)),
            )
            for x, size in _SIZES.items()
        ),
        StateTensor(key="a_log", name="A_log", shape=_HEADS, float32=True),
        StateTensor(key="dt_bias", name="dt_bias", shape=_HEADS, float32=True),
        StateTensor(
            key="norm",
            name="o_norm.weight",
            shape=(("linear_value_head_dim",),),
            of_heads=False,  # one for all heads
        ),
    ),
)
_BEFORE = (
    Norm(name="input_layernorm", feeds=OLMO_DELTA.inputs.name, layers="states"),
    Norm(name="post_attention_layernorm", feeds=GATE_UP.name, layers="states"),
)
_AFTER = tuple(Norm(name=norm.name, layers="attention") for norm in NORMS_AFTER)
OLMO_HYBRID: dict[str, Any] = {
    **OLMO,
    "builder": "hybrid.olmo",
    "state_mixer": OLMO_DELTA,
    "norms": (*_BEFORE, *_AFTER, *WHOLE_NORMS),
    "rope": "rope_theta",
    "rules": None,
    # transformers' own files; in those of layers with attention it renames a norm, too
    "other_names": {
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
    "joined_in_transformers": {
        "linear_attn.conv1d.weight": tuple(f"linear_attn.{x}_conv1d.weight" for x in _SIZES),
    },
}
