"""Values of the rows of Mamba, FalconMamba, Mamba 2 and Jamba in families.py."""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.experts import Router
from formats.architecture.flags import Flag, Stated
from formats.architecture.projection import Projection
from formats.architecture.rows.parts import BEFORE_ATTENTION, NAMES, experts, gated
from formats.architecture.states.mixer import StateMixer, StateTensor
from formats.architecture.states.parts import mamba


def mamba_1(module: str, bias: Flag, conv_bias: Flag, norms: bool = False) -> StateMixer:
    """Return a Mamba-1 mixer below `module`.

    `bias`: of the first and the last projection. `norms`: dt, B and C have norms with weights.
    """
    channels = (("mamba_channels",),)
    of_norms = (("dt", "mamba_dt_rank"), ("b", "mamba_d_state"), ("c", "mamba_d_state"))
    return StateMixer(
        kind="Mamba-1",
        module=module,
        inputs=Projection(
            name=f"{module}.in_proj",
            members=((f"{module}.in_proj", "mamba_channels_in"),),
            inputs="hidden_size",
            bias=bias,
        ),
        selection=(
            Projection(
                name=f"{module}.x_proj",
                members=((f"{module}.x_proj", "mamba_selection"),),
                inputs="mamba_channels",
                split="inputs",
                float_because="few outputs, which control what each token writes and forgets",
            ),
            Projection(
                name=f"{module}.dt_proj",
                members=((f"{module}.dt_proj", "mamba_channels"),),
                inputs="mamba_dt_rank",
                bias=True,
                float_because="few inputs, and its outputs control what each token forgets",
            ),
        ),
        out=Projection(
            name=f"{module}.out_proj",
            members=((f"{module}.out_proj", "hidden_size"),),
            inputs="mamba_channels",
            split="inputs",
            bias=bias,
        ),
        others=(
            StateTensor(
                key="conv_weight",
                name="conv1d.weight",
                shape=(*channels, ("one",), ("mamba_d_conv",)),
            ),
            StateTensor(key="conv_bias", name="conv1d.bias", shape=channels, present=conv_bias),
            StateTensor(
                key="a_log", name="A_log", shape=(*channels, ("mamba_d_state",)), float32=True
            ),
            StateTensor(key="skip", name="D", shape=channels, float32=True),
            *(
                StateTensor(
                    key=f"{name}_norm",
                    name=f"{name}_layernorm.weight",
                    shape=((size,),),
                    present=norms,
                    of_heads=False,
                )
                for name, size in of_norms
            ),
        ),
        attention_key="attn_layer_indices",  # derived from a period and an offset
    )


MAMBA: dict[str, Any] = {
    "builder": "hybrid.mamba",
    "state_mixer": replace(mamba_1("mixer", "use_bias", Stated("use_conv_bias", True)), alone=True),
    "norms": (Norm(name="norm", feeds="mixer.in_proj"),),
    "norm_eps_key": "layer_norm_epsilon",
    "rope": "none",
    "tied": True,
    "config_keys": {
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_rank": "time_step_rank",
        "mamba_expand": "expand",
    },
    "layer": "backbone.layers.{i}",
    "embedding": "backbone.embeddings.weight",
    "last_norm": "backbone.norm_f.weight",
}
MAMBA_2: dict[str, Any] = {
    **MAMBA,
    "state_mixer": replace(
        mamba("mixer", "use_bias", "use_bias", Stated("use_conv_bias", True), True), alone=True
    ),
    "tied": False,
    "config_keys": {
        "mamba_n_heads": "num_heads",
        "mamba_d_head": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
    },
}
_JAMBA_MLP = gated("feed_forward", *NAMES, "intermediate_size")
_JAMBA_MLP["gate_up"] = replace(_JAMBA_MLP["gate_up"], name="feed_forward.gate_up_proj")
JAMBA: dict[str, Any] = {
    "builder": "hybrid.jamba",
    **_JAMBA_MLP,
    "state_mixer": mamba_1("mamba", "mamba_proj_bias", Stated("mamba_conv_bias", True), norms=True),
    "norms": (BEFORE_ATTENTION, Norm(name="pre_ff_layernorm", feeds="feed_forward")),
    "rope": "none",
    "last_norm": "model.final_layernorm.weight",
    "experts": experts(
        "feed_forward",
        NAMES,
        "intermediate_size",
        Router(name="router"),
        types_key="mlp_layer_types",
    ),
}
