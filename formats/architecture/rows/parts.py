"""Projections, norms and other values that several rows of families.py share."""

from dataclasses import replace
from typing import Any

from formats.architecture.columns import QWEN_MTP, ConfigRules, Norm
from formats.architecture.experts import Experts, Router, SharedExpert
from formats.architecture.flags import Equals, Flag, Stated
from formats.architecture.projection import Projection

_Q, _K, _V, _O = (f"self_attn.{name}_proj" for name in "qkvo")
QKV = Projection(
    name="self_attn.qkv_proj",
    members=((_Q, "q"), (_K, "kv"), (_V, "kv")),
    inputs="hidden_size",
)
GATE_UP = Projection(
    name="mlp.gate_up_proj",
    members=(("mlp.gate_proj", "intermediate_size"), ("mlp.up_proj", "intermediate_size")),
    inputs="hidden_size",
)
BEFORE_ATTENTION = Norm(name="input_layernorm", feeds=QKV.name)
HEAD_NORMS = tuple(Norm(name=f"self_attn.{x}_norm", size="head_dim") for x in "qk")
WHOLE_NORMS = (
    Norm(name="self_attn.q_norm", size="q"),
    Norm(name="self_attn.k_norm", size="kv"),
)

O_PROJ = Projection(name=_O, members=((_O, "hidden_size"),), inputs="q", split="inputs")
DOWN = Projection(
    name="mlp.down_proj",
    members=(("mlp.down_proj", "hidden_size"),),
    inputs="intermediate_size",
    split="inputs",
)
# Defaults of a row, and values that several rows share.
USUAL = {
    "qkv": QKV,
    "o": O_PROJ,
    "gate_up": GATE_UP,
    "down": DOWN,
    "norms": (BEFORE_ATTENTION, Norm(name="post_attention_layernorm", feeds=GATE_UP.name)),
}
ATTENTION_BIAS = {
    "qkv": replace(QKV, bias="attention_bias"),
    "o": replace(O_PROJ, bias="attention_bias"),
}
GEMMA_NORMS = (
    BEFORE_ATTENTION,
    Norm(name="post_attention_layernorm"),
    Norm(name="pre_feedforward_layernorm", feeds=GATE_UP.name),
    Norm(name="post_feedforward_layernorm"),
)
GEMMA = {
    **ATTENTION_BIAS,
    "norm_offset": 1.0,
    "float32_norms": True,
    "activation_key": "hidden_activation",
    "activations": ("gelu_pytorch_tanh",),
    "window": "layer_types",
    "embedding_times_root": True,
    "logits_cap_key": "final_logit_softcapping",
    "tied": True,
    "float16": False,
    "rules": ConfigRules(defaults={"num_key_value_heads": 4, "head_dim": 256}),
}
GEMMA_1 = {
    **{name: value for name, value in GEMMA.items() if name not in ("window", "logits_cap_key")},
    "norms": (BEFORE_ATTENTION, Norm(name="post_attention_layernorm", feeds=GATE_UP.name)),
    "activation_key": "hidden_act",
    # early files say "gelu"; for them, too, transformers computes gelu_pytorch_tanh
    "activations": ("gelu_pytorch_tanh", "gelu"),
    "fixed": {"use_bidirectional_attention": None},
    "rules": ConfigRules(defaults={"num_key_value_heads": 16, "head_dim": 256}),
}
MLP_BIAS = {
    "gate_up": replace(GATE_UP, bias="mlp_bias"),
    "down": replace(DOWN, bias="mlp_bias"),
}
# Norms only after attention and after the feed-forward.
NORMS_AFTER = (
    Norm(name="post_attention_layernorm"),
    Norm(name="post_feedforward_layernorm"),
)
OLMO = {
    **ATTENTION_BIAS,
    "norms": (*NORMS_AFTER, *WHOLE_NORMS),
    "float32_norms": True,
    "rules": ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
}
MISTRAL = {
    "window": "all",
    "rules": ConfigRules(may_be_null=("head_dim",), defaults={"num_key_value_heads": 8}),
}


# Parallel block: attention and feed-forward read the same norm, which has no bias.
COHERE = {
    **ATTENTION_BIAS,
    "parallel": True,
    "norms": (BEFORE_ATTENTION,),
    "norm_kind": "layer",
    "norm_eps_key": "layer_norm_eps",
    "interleaved_rope": True,
    "logits_factor_key": "logit_scale",
    "tied": True,
}


def ungated(up: str, down: str, bias: Flag) -> dict[str, Any]:
    """Return a feed-forward of two linears with an activation between them."""
    return {**up_and_down(up, down, "intermediate_size", bias), "gated": False}


def up_and_down(up: str, down: str, inner: str, bias: Flag = False) -> dict[str, Projection]:
    """Return the projections of a feed-forward of two linears with `inner` features."""
    return {
        "gate_up": Projection(name=up, members=((up, inner),), inputs="hidden_size", bias=bias),
        "down": Projection(
            name=down, members=((down, "hidden_size"),), inputs=inner, split="inputs", bias=bias
        ),
    }


STARCODER_BIAS = Stated("use_bias", True)
OPT_BIAS = Stated("enable_bias", True)
OPT = {
    "qkv": replace(QKV, bias=OPT_BIAS),
    "o": replace(
        O_PROJ,
        name="self_attn.out_proj",
        members=(("self_attn.out_proj", "hidden_size"),),
        bias=OPT_BIAS,
    ),
    **ungated("fc1", "fc2", OPT_BIAS),
    "norms": (
        Norm(name="self_attn_layer_norm", feeds=QKV.name),
        Norm(name="final_layer_norm", feeds="fc1"),
    ),
}


LAYER_NORM = {"norm_kind": "layer", "norm_bias": True, "norm_eps_key": "layer_norm_eps"}
STABLELM = {
    "qkv": replace(QKV, bias="use_qkv_bias"),
    **LAYER_NORM,
    "fixed": {"use_parallel_residual": False, "qk_layernorm": False},
}
PHI = {
    "qkv": replace(QKV, bias=True),
    "o": replace(
        O_PROJ,
        name="self_attn.dense",
        members=(("self_attn.dense", "hidden_size"),),
        bias=True,
    ),
    **ungated("mlp.fc1", "mlp.fc2", True),
    **LAYER_NORM,
    "parallel": True,
    "norms": (BEFORE_ATTENTION,),
    "activations": ("gelu_new",),
    "fixed": {"qk_layernorm": False},
    "last_norm": "model.final_layernorm.weight",
    "head_bias": True,
}
_NEOX_BIAS = Stated("attention_bias", True)
_NEOX_QKV = "attention.query_key_value"
GPT_NEOX = {
    "qkv": replace(QKV, name=_NEOX_QKV, bias=_NEOX_BIAS, stored_fused=True, by_head=True),
    "o": replace(
        O_PROJ,
        name="attention.dense",
        members=(("attention.dense", "hidden_size"),),
        bias=_NEOX_BIAS,
    ),
    **ungated("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", True),
    **LAYER_NORM,
    "norms": (
        Norm(name="input_layernorm", feeds=_NEOX_QKV),
        Norm(name="post_attention_layernorm", feeds="mlp.dense_h_to_4h"),
    ),
    "activations": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    "layer": "gpt_neox.layers.{i}",
    "embedding": "gpt_neox.embed_in.weight",
    "last_norm": "gpt_neox.final_layer_norm.weight",
    "head": "embed_out.weight",
    "masks": ("attention.bias", "attention.masked_bias"),
}


def norms_before(module: str) -> tuple[Norm, Norm]:
    """Return a layer's two norms; the second feeds `module` (feed-forward or its first linear)."""
    return BEFORE_ATTENTION, Norm(name="post_attention_layernorm", feeds=module)


def gated(module: str, gate: str, up: str, down: str, inner: str) -> dict[str, Projection]:
    """Return the projections of a gated feed-forward `module` with `inner` features."""
    return {
        "gate_up": Projection(
            name=f"{module}.gate_up",
            members=((f"{module}.{gate}", inner), (f"{module}.{up}", inner)),
            inputs="hidden_size",
        ),
        "down": Projection(
            name=f"{module}.{down}",
            members=((f"{module}.{down}", "hidden_size"),),
            inputs=inner,
            split="inputs",
        ),
    }


NAMES = ("gate_proj", "up_proj", "down_proj")


def experts(
    module: str, names: tuple[str, str, str], inner: str, routing: Router, **different: Any
) -> Experts:
    """Return experts below `module`, with linears of these names and `inner` features."""
    stem = f"{module}.experts" if module else "experts"
    projections = gated(f"{stem}.{{e}}", *names, inner)
    return Experts(module=module, routing=routing, **projections, **different)


# layers without experts in Qwen's families
QWEN_DENSE = {"dense_layers_key": "mlp_only_layers", "every_key": "decoder_sparse_step"}
GROUPED_ROUTER = Router(
    scores="sigmoid",
    normalized="norm_topk_prob",
    float32=True,
    correction="gate.e_score_correction_bias",
    group_score="top2",
    factor_key="routed_scaling_factor",
)
QWEN_ROUTER = Router(normalized="norm_topk_prob", rounded=True)


MELLUM = {
    **ATTENTION_BIAS,
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        replace(QWEN_ROUTER, normalized=Stated("norm_topk_prob", True)),
        types_key="mlp_layer_types",
    ),
    "norms": (*norms_before("mlp"), *HEAD_NORMS),
    "window": "layer_types",
    "draft_prefix": "mtp.",
}
KOLIBRI = {
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(
            scores="sigmoid_of_chosen",
            normalized="norm_topk_prob",
            float32=True,
            correction="gate.e_score_correction_bias",
        ),
        shared=SharedExpert(
            **gated("mlp.shared_experts", *NAMES, "shared_expert_intermediate_size")
        ),
    ),
    "inner_key": "moe_intermediate_size",  # no layer has a dense feed-forward
    "norms": (
        *norms_before("mlp"),
        Norm(name="post_self_attn_layernorm"),
        Norm(name="post_mlp_layernorm"),
        *HEAD_NORMS,
    ),
    "window": "layer_types",
    "rope": "windows",
    # names of published files
    "other_names": {
        "post_attn_norm": "post_self_attn_layernorm",
        "post_ffn_norm": "post_mlp_layernorm",
    },
    "other_tensors": {"moe.router.expert_bias": "mlp.gate.e_score_correction_bias"},
}
# Fields that differ by the key that stored_form/mixtures.py adds: kind of norms, router's scores,
# and shared experts or none.
COHERE_KIND = "cohere2_moe_kind"
_COHERE_RMS = {"norm_kind": "rms", "norm_eps_key": "rms_norm_eps"}
_COHERE_SHARED = SharedExpert(
    **gated("mlp.shared_experts", *NAMES, "shared_expert_intermediate_size")
)


def _cohere_experts(scores: str, shared: bool) -> Experts:
    return experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(
            scores=f"{scores}_of_chosen",
            normalized=Stated("norm_topk_prob", True) if scores == "sigmoid" else False,
            rounded=True,
        ),
        shared=_COHERE_SHARED if shared else None,
        types_key="mlp_layer_types",
    )


COHERE_MOE = {
    **COHERE,
    "experts": _cohere_experts("softmax", False),
    "inner_key": "prefix_dense_intermediate_size",
    # the experts have intermediate_size, layers without experts prefix_dense_intermediate_size
    "config_keys": {"moe_intermediate_size": "intermediate_size"},
    "window": "layer_types",
    "rope": "no_rope_layers",
    "fixed": {"use_parallel_block": True, "use_qk_norm": False},
    "variants": tuple(
        (
            Equals(COHERE_KIND, [norms, scores, shared]),
            {
                "experts": _cohere_experts(scores, shared),
                **(_COHERE_RMS if norms == "rms" else {}),
            },
        )
        for norms in ("rms", "layer")
        for scores in ("sigmoid", "softmax")
        for shared in (True, False)
    ),
}
FLINT = {
    **ATTENTION_BIAS,
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(scores="sigmoid", normalized=Stated("norm_topk_prob", True), float32=True),
        shared=SharedExpert(
            **gated("mlp.shared_expert", *NAMES, "shared_expert_intermediate_size")
        ),
        **QWEN_DENSE,
    ),
    "sinks": "self_attn.softmax_offset",
    "names_in_transformers": {"self_attn.softmax_offset": "self_attn.sinks"},
    "norms": (*norms_before("mlp"), *HEAD_NORMS),
    "window": "layer_types",
    "rope": "windows",
}
HY_3 = {
    **ATTENTION_BIAS,
    "experts": experts(
        "mlp",
        NAMES,
        "moe_intermediate_size",
        Router(
            name="router.gate",
            scores="sigmoid",
            normalized=True,
            float32=True,
            correction="expert_bias",
            factor_key="router_scaling_factor",
        ),
        shared=SharedExpert(**gated("mlp.shared_mlp", *NAMES, "shared_experts")),
        types_key="mlp_layer_types",
    ),
    "names_in_transformers": {
        "mlp.router.gate.weight": "mlp.gate.weight",
        "mlp.expert_bias": "mlp.e_score_correction_bias",
        "mlp.shared_mlp": "mlp.shared_experts",
    },
    "norms": (*norms_before("mlp"), *HEAD_NORMS),
    "fixed": {"mlp_bias": False},
    "config_keys": {"n_shared_experts": "num_shared_experts"},
    "draft_prefix": "model.layers.80.",  # an MTP layer after the 80 of published models
}
QWEN_HYBRID = {
    "qkv": replace(QKV, members=((_Q, "q_and_gate"), *QKV.members[1:]), bias="attention_bias"),
    "o": replace(O_PROJ, bias="attention_bias"),
    "gated_attention": True,
    "norm_offset": 1.0,
    "float32_norms": True,
    "draft_prefix": "mtp.",
    "draft_names": QWEN_MTP,
}
