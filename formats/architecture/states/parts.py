"""Values of rows of families.py with recurrent layers: mixers, and the families made of them."""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import Norm
from formats.architecture.experts import Experts, Router, SharedExpert
from formats.architecture.flags import Equals, Flag, Stated
from formats.architecture.projection import Projection
from formats.architecture.rows.parts import (
    ATTENTION_BIAS,
    BEFORE_ATTENTION,
    GROUPED_ROUTER,
    HEAD_NORMS,
    NAMES,
    O_PROJ,
    QKV,
    experts,
    gated,
    norms_before,
    ungated,
    up_and_down,
)
from formats.architecture.states.mixer import StateMixer, StateTensor

_HEADS = (("linear_num_value_heads",),)
DELTA_NET = StateMixer(
    kind="gated delta nets",
    module="linear_attn",
    inputs=Projection(
        name="linear_attn.in_proj_qkvz",
        members=(("linear_attn.in_proj_qkv", "delta_qkv"), ("linear_attn.in_proj_z", "delta_v")),
        inputs="hidden_size",
    ),
    gates=Projection(
        name="linear_attn.in_proj_ba",
        members=(
            ("linear_attn.in_proj_b", "linear_num_value_heads"),
            ("linear_attn.in_proj_a", "linear_num_value_heads"),
        ),
        inputs="hidden_size",
        float_because="few outputs, which control what each token writes and forgets",
    ),
    out=Projection(
        name="linear_attn.out_proj",
        members=(("linear_attn.out_proj", "hidden_size"),),
        inputs="delta_v",
        split="inputs",
    ),
    others=(
        StateTensor(
            key="conv_weight",
            name="conv1d.weight",
            shape=(("delta_qkv",), ("one",), ("linear_conv_kernel_dim",)),
        ),
        StateTensor(key="a_log", name="A_log", shape=_HEADS, float32=True),
        StateTensor(key="dt_bias", name="dt_bias", shape=_HEADS, float32=True),
        StateTensor(
            key="norm",
            name="norm.weight",
            shape=(("linear_value_head_dim",),),
            of_heads=False,  # all heads share it
        ),
    ),
)


_CONV_BIAS = "conv_bias"
SHORT_CONV = StateMixer(
    kind="short convolutions",
    module="conv",
    inputs=Projection(
        name="conv.in_proj",
        members=(("conv.in_proj", "short_conv_in"),),
        inputs="hidden_size",
        bias=_CONV_BIAS,
    ),
    out=Projection(
        name="conv.out_proj",
        members=(("conv.out_proj", "hidden_size"),),
        inputs="hidden_size",
        split="inputs",
        bias=_CONV_BIAS,
    ),
    others=(
        StateTensor(
            key="conv_weight",
            name="conv.weight",
            shape=(("hidden_size",), ("one",), ("conv_L_cache",)),
        ),
        StateTensor(
            key="conv_bias", name="conv.bias", shape=(("hidden_size",),), present=_CONV_BIAS
        ),
    ),
    layer_type="conv",
)
_LFM2_NAMES = ("w1", "w3", "w2")
_LFM2_MLP = gated("feed_forward", *_LFM2_NAMES, "intermediate_size")
_LFM2_MLP["gate_up"] = replace(_LFM2_MLP["gate_up"], name="feed_forward.w13")
_LFM2_HEAD_NORMS = tuple(Norm(name=f"self_attn.{x}_layernorm", size="head_dim") for x in "qk")
LFM2 = {
    "o": replace(
        O_PROJ,
        name="self_attn.out_proj",
        members=(("self_attn.out_proj", "hidden_size"),),
    ),
    **_LFM2_MLP,
    "state_mixer": SHORT_CONV,
    "norms": (
        Norm(name="operator_norm", feeds=QKV.name),
        Norm(name="ffn_norm", feeds=_LFM2_MLP["gate_up"].name),
        *_LFM2_HEAD_NORMS,
    ),
    "norm_eps_key": "norm_eps",
    "activation_key": "",
    "inner_key": "block_ff_dim",
    "tied": True,
    "last_norm": "model.embedding_norm.weight",
}
_SANDWICH = Stated("use_sandwich_norm", True)
_HEAD_GATES = "self_attn.gate_proj"
LFM3: dict[str, Any] = {
    **{name: value for name, value in LFM2.items() if name not in ("o", "inner_key")},
    **ATTENTION_BIAS,
    "norms": (
        *LFM2["norms"][:2],
        Norm(name="post_operator_norm", present=_SANDWICH),
        Norm(name="post_ffn_norm", present=_SANDWICH),
        *HEAD_NORMS,
    ),
    "head_gates": Projection(
        name=_HEAD_GATES,
        members=((_HEAD_GATES, "num_attention_heads"),),
        inputs="hidden_size",
        float_because="one output per head, which gates it",
    ),
    "gate_activation": "sigmoid",
    "names_in_transformers": {_HEAD_GATES: "self_attn.g_proj"},
    "window": "layer_types",
    "variants": ((Equals("use_attention_gate", False), {"head_gates": None}),),
}
LFM2_MOE = {
    **LFM2,
    "experts": experts(
        "feed_forward",
        _LFM2_NAMES,
        "moe_intermediate_size",
        Router(
            scores="sigmoid",
            normalized=Stated("norm_topk_prob", True),
            correction="expert_bias",
            factor_key="routed_scaling_factor",
        ),
        first_dense_key="num_dense_layers",
    ),
    "norms": (
        Norm(name="operator_norm", feeds=QKV.name),
        Norm(name="ffn_norm", feeds="feed_forward"),
        *_LFM2_HEAD_NORMS,
    ),
    "inner_key": "intermediate_size",
    "fixed": {"use_expert_bias": True},
}


def mamba(module: str, in_bias: Flag, out_bias: Flag, conv_bias: Flag, norm: Flag) -> StateMixer:
    """Return a Mamba-2 mixer below `module`. `norm`: its output is normalized."""
    heads = (("mamba_n_heads",),)
    return StateMixer(
        kind="Mamba-2",
        module=module,
        inputs=Projection(
            name=f"{module}.in_proj",
            members=((f"{module}.in_proj", "mamba_in"),),
            inputs="hidden_size",
            bias=in_bias,
        ),
        out=Projection(
            name=f"{module}.out_proj",
            members=((f"{module}.out_proj", "hidden_size"),),
            inputs="mamba_inner",
            split="inputs",
            bias=out_bias,
        ),
        others=(
            StateTensor(
                key="conv_weight",
                name="conv1d.weight",
                shape=(("mamba_conv",), ("one",), ("mamba_d_conv",)),
            ),
            StateTensor(
                key="conv_bias", name="conv1d.bias", shape=(("mamba_conv",),), present=conv_bias
            ),
            StateTensor(key="a_log", name="A_log", shape=heads, float32=True),
            StateTensor(key="skip", name="D", shape=heads, float32=True),
            StateTensor(key="dt_bias", name="dt_bias", shape=heads, float32=True),
            StateTensor(key="norm", name="norm.weight", shape=(("mamba_inner",),), present=norm),
        ),
    )


_MAMBA_BIAS = "mamba_proj_bias"
_MAMBA_CONV_BIAS = Stated("mamba_conv_bias", True)
_GATE_AND_UP = ("shared_mlp.gate", "shared_mlp.up")  # fused in files
_SHARED_UP, _SHARED_DOWN = "shared_mlp.input_linear", "shared_mlp.output_linear"
_GRANITE_MLP = {
    "gate_up": Projection(
        name=_SHARED_UP,
        members=tuple((name, "intermediate_size") for name in _GATE_AND_UP),
        inputs="hidden_size",
        stored_fused=True,
    ),
    "down": Projection(
        name=_SHARED_DOWN,
        members=((_SHARED_DOWN, "hidden_size"),),
        inputs="intermediate_size",
        split="inputs",
    ),
}
_GRANITE_SHARED = {
    "gate_up": replace(
        _GRANITE_MLP["gate_up"],
        members=tuple((name, "shared_intermediate_size") for name in _GATE_AND_UP),
    ),
    "down": replace(_GRANITE_MLP["down"], inputs="shared_intermediate_size"),
}
_GRANITE_EXPERTS = experts(
    "block_sparse_moe",
    NAMES,
    "intermediate_size",
    Router(name="router.layer", scores="softmax_of_chosen", rounded=True),
    shared=SharedExpert(**_GRANITE_SHARED),
    stacks=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    stacks_only=True,
)
# without experts, which the variant has
GRANITE_HYBRID = {
    **ATTENTION_BIAS,
    **_GRANITE_MLP,
    "state_mixer": mamba("mamba", _MAMBA_BIAS, _MAMBA_BIAS, _MAMBA_CONV_BIAS, True),
    "norms": norms_before(_SHARED_UP),
    "inner_key": "shared_intermediate_size",
    "rope": "position_embedding_type",
    "embedding_factor_key": "embedding_multiplier",
    "logits_divisor_key": "logits_scaling",
    "variants": (
        (
            Stated("num_local_experts", True),
            {
                "experts": _GRANITE_EXPERTS,
                "names_in_transformers": {
                    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight"
                },
                "norms": norms_before(_GRANITE_EXPERTS.module),
                "inner_key": "intermediate_size",
            },
        ),
    ),
}
_FALCON_MLP = gated("feed_forward", *NAMES, "intermediate_size")
_FALCON_MLP["gate_up"] = replace(_FALCON_MLP["gate_up"], name="feed_forward.gate_up_proj")
FALCON_H1 = {
    **{name: replace(projection, bias="mlp_bias") for name, projection in _FALCON_MLP.items()},
    "state_mixer": replace(
        mamba("mamba", False, "projectors_bias", _MAMBA_CONV_BIAS, "mamba_rms_norm"),
        parallel_to_attention=True,
    ),
    "norms": (
        BEFORE_ATTENTION,
        Norm(name="pre_ff_layernorm", feeds=_FALCON_MLP["gate_up"].name),
    ),
    "embedding_factor_key": "embedding_multiplier",
    "logits_factor_key": "lm_head_multiplier",
    # a factor before a linear is applied after it, which would be wrong with a bias
    "fixed": {"attention_bias": False, "mamba_proj_bias": False},
    "last_norm": "model.final_layernorm.weight",
}
# Granite's mixers with Falcon-H1's names, without factors; half of a head is rotated
BAMBA = {
    **ATTENTION_BIAS,
    **{name: replace(projection, bias="mlp_bias") for name, projection in _FALCON_MLP.items()},
    "state_mixer": replace(
        mamba("mamba", _MAMBA_BIAS, _MAMBA_BIAS, _MAMBA_CONV_BIAS, True),
        attention_key="attn_layer_indices",
    ),
    "norms": FALCON_H1["norms"],
    "last_norm": "model.final_layernorm.weight",
}
_NEMOTRON_EXPERTS = Experts(
    module="mixer",
    **up_and_down(
        "mixer.experts.{e}.up_proj", "mixer.experts.{e}.down_proj", "moe_intermediate_size"
    ),
    routing=replace(GROUPED_ROUTER, normalized=Stated("norm_topk_prob", True)),
    shared=SharedExpert(
        **up_and_down(
            "mixer.shared_experts.up_proj",
            "mixer.shared_experts.down_proj",
            "moe_shared_expert_intermediate_size",
            "mlp_bias",
        )
    ),
    stacks=("mixer.experts.up_proj", "mixer.experts.down_proj"),
    types_key="mlp_layer_types",
)
_LATENT = "moe_latent_size"
_NEMOTRON_LATENT_EXPERTS = replace(
    _NEMOTRON_EXPERTS,
    gate_up=_NEMOTRON_EXPERTS.gate_up.with_size("hidden_size", _LATENT),
    down=_NEMOTRON_EXPERTS.down.with_size("hidden_size", _LATENT),
    latent=tuple(
        Projection(
            name=f"mixer.{name}",
            members=((f"mixer.{name}", outputs),),
            inputs=inputs,
            bias="mlp_bias",
        )
        for name, outputs, inputs in (
            ("fc1_latent_proj", _LATENT, "hidden_size"),
            ("fc2_latent_proj", "hidden_size", _LATENT),
        )
    ),
)
# without experts, which the variants have
NEMOTRON_H = {
    "qkv": replace(
        QKV,
        name="mixer.qkv_proj",
        members=tuple((name.replace("self_attn", "mixer"), size) for name, size in QKV.members),
    ),
    "o": replace(O_PROJ, name="mixer.o_proj", members=(("mixer.o_proj", "hidden_size"),)),
    **ungated("mixer.up_proj", "mixer.down_proj", "mlp_bias"),
    "state_mixer": mamba("mixer", "use_bias", "use_bias", Stated("use_conv_bias", True), True),
    "lone_blocks": True,
    "norms": (Norm(name="norm", feeds="mixer.qkv_proj"),),
    "norm_eps_key": "layer_norm_epsilon",
    "float32_norms": True,
    "activation_key": "mlp_hidden_act",
    "activations": ("relu2",),
    "rope": "none",
    "config_keys": {
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size",
        "mamba_d_conv": "conv_kernel",
    },
    "draft_prefix": "mtp.",
    "variants": (
        (_LATENT, {"experts": _NEMOTRON_LATENT_EXPERTS}),
        ("mlp_layer_types", {"experts": _NEMOTRON_EXPERTS}),
    ),
    "layer": "backbone.layers.{i}",
    "layer_in_transformers": "model.layers.{i}",
    "embedding": "backbone.embeddings.weight",
    "last_norm": "backbone.norm_f.weight",
}
