"""Every model family that the project knows: names, shapes, biases, norms and splits, a row each.

All four packages read them. What a served family computes stands in qserve/model/families/.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.family import (
    ConfigRules,
    DeltaNet,
    Experts,
    Family,
    Norm,
    Projection,
    Router,
    SharedExpert,
    Stated,
)

_Q, _K, _V, _O = (f"self_attn.{name}_proj" for name in "qkvo")
_QKV = Projection(
    name="self_attn.qkv_proj",
    members=((_Q, "q"), (_K, "kv"), (_V, "kv")),
    inputs="hidden_size",
)
_GATE_UP = Projection(
    name="mlp.gate_up_proj",
    members=(("mlp.gate_proj", "intermediate_size"), ("mlp.up_proj", "intermediate_size")),
    inputs="hidden_size",
)
_BEFORE_ATTENTION = Norm(name="input_layernorm", feeds=_QKV.name)
_HEAD_NORMS = tuple(Norm(name=f"self_attn.{x}_norm", size="head_dim") for x in "qk")
_WHOLE_NORMS = (
    Norm(name="self_attn.q_norm", size="q"),
    Norm(name="self_attn.k_norm", size="kv"),
)

_O_PROJ = Projection(name=_O, members=((_O, "hidden_size"),), inputs="q", split="inputs")
_DOWN = Projection(
    name="mlp.down_proj",
    members=(("mlp.down_proj", "hidden_size"),),
    inputs="intermediate_size",
    split="inputs",
)
# What a row has unless it says otherwise, and what several rows have.
_USUAL = {
    "qkv": _QKV,
    "o": _O_PROJ,
    "gate_up": _GATE_UP,
    "down": _DOWN,
    "norms": (_BEFORE_ATTENTION, Norm(name="post_attention_layernorm", feeds=_GATE_UP.name)),
}
_ATTENTION_BIAS = {
    "qkv": replace(_QKV, bias="attention_bias"),
    "o": replace(_O_PROJ, bias="attention_bias"),
}
_GEMMA_NORMS = (
    _BEFORE_ATTENTION,
    Norm(name="post_attention_layernorm"),
    Norm(name="pre_feedforward_layernorm", feeds=_GATE_UP.name),
    Norm(name="post_feedforward_layernorm"),
)
_GEMMA = {
    **_ATTENTION_BIAS,
    "norm_offset": 1.0,
    "float32_norms": True,
    "activation_key": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
    "window": "layer_types",
    "embedding_times_root": True,
    "logits_cap_key": "final_logit_softcapping",
    "tied": True,
    "float16": False,
    "rules": ConfigRules(defaults={"num_key_value_heads": 4, "head_dim": 256}),
}
_MLP_BIAS = {
    "gate_up": replace(_GATE_UP, bias="mlp_bias"),
    "down": replace(_DOWN, bias="mlp_bias"),
}
# Norms stand behind attention and the feed-forward alone.
_NORMS_AFTER = (
    Norm(name="post_attention_layernorm"),
    Norm(name="post_feedforward_layernorm"),
)
_OLMO = {
    **_ATTENTION_BIAS,
    "norms": (*_NORMS_AFTER, *_WHOLE_NORMS),
    "float32_norms": True,
    "rules": ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
}
_MISTRAL = {
    "window": "all",
    "rules": ConfigRules(may_be_null=("head_dim",), defaults={"num_key_value_heads": 8}),
}


def _norms_before(module: str) -> tuple[Norm, Norm]:
    """Of a layer whose feed-forward is `module`."""
    return _BEFORE_ATTENTION, Norm(name="post_attention_layernorm", feeds=module)


def _gated(module: str, gate: str, up: str, down: str, inner: str) -> dict[str, Projection]:
    """The projections of a feed-forward below `module` with `inner` features."""
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


_NAMES = ("gate_proj", "up_proj", "down_proj")


def _experts(
    module: str, names: tuple[str, str, str], inner: str, routing: Router, **different: Any
) -> Experts:
    """Experts below `module`, whose linears have these names and `inner` features."""
    projections = _gated(f"{module}.experts.{{e}}", *names, inner)
    return Experts(module=module, routing=routing, **projections, **different)


# Layers of Qwen's families that have no experts.
_QWEN_DENSE = {"dense_layers_key": "mlp_only_layers", "every_key": "decoder_sparse_step"}
_QWEN_ROUTER = Router(normalized="norm_topk_prob", rounded=True)


_DELTA_NET = DeltaNet(
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
        float_because="says how much each token writes and forgets, in few outputs",
    ),
    out=Projection(
        name="linear_attn.out_proj",
        members=(("linear_attn.out_proj", "hidden_size"),),
        inputs="delta_v",
        split="inputs",
    ),
)
_QWEN_HYBRID = {
    "qkv": replace(_QKV, members=((_Q, "q_and_gate"), *_QKV.members[1:]), bias="attention_bias"),
    "o": replace(_O_PROJ, bias="attention_bias"),
    "gated_attention": True,
    "norm_offset": 1.0,
    "float32_norms": True,
    "draft_prefix": "mtp.",
}


def _family(architecture: str, model_type: str, **different: Any) -> Family:
    """The usual row with what is different."""
    return Family(architecture=architecture, model_type=model_type, **{**_USUAL, **different})


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        _family(
            "LlamaForCausalLM",
            "llama",
            builder="llama",
            **_ATTENTION_BIAS,
            **_MLP_BIAS,
            rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
        ),
        _family("MistralForCausalLM", "mistral", builder="llama", **_MISTRAL),
        _family(
            "MinistralForCausalLM",
            "ministral",
            builder="llama",
            **{**_MISTRAL, "window": "layer_types"},
        ),
        _family(
            "Ministral3ForCausalLM",
            "ministral3",
            builder="ministral3",
            window="all",
            rules=ConfigRules(defaults={"num_key_value_heads": 8, "head_dim": 128}),
        ),
        _family(
            "Qwen2ForCausalLM",
            "qwen2",
            builder="llama",
            qkv=replace(_QKV, bias=True),
            window="layer_types",
            rules=ConfigRules(
                may_be_null=("num_key_value_heads", "head_dim"),
                defaults={"num_key_value_heads": 32},
            ),
        ),
        _family(
            "Qwen3ForCausalLM",
            "qwen3",
            builder="qwen3",
            **_ATTENTION_BIAS,
            norms=(*_USUAL["norms"], *_HEAD_NORMS),
            window="layer_types",
            rules=ConfigRules(
                may_be_null=("num_key_value_heads",),
                defaults={"num_key_value_heads": 32, "head_dim": 128},
            ),
        ),
        _family(
            "Phi3ForCausalLM",
            "phi3",
            builder="llama",
            qkv=replace(_QKV, stored_fused=True),
            gate_up=replace(_GATE_UP, stored_fused=True),
            window="all",
            rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
        ),
        _family("Gemma2ForCausalLM", "gemma2", builder="gemma2", **_GEMMA, norms=_GEMMA_NORMS),
        _family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            builder="gemma3",
            **_GEMMA,
            norms=(*_GEMMA_NORMS, *_HEAD_NORMS),
        ),
        _family(
            "GraniteForCausalLM",
            "granite",
            builder="granite",
            **_ATTENTION_BIAS,
            **_MLP_BIAS,
            embedding_factor_key="embedding_multiplier",
            logits_divisor_key="logits_scaling",
            rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
        ),
        _family(
            "SmolLM3ForCausalLM",
            "smollm3",
            builder="llama",
            **_ATTENTION_BIAS,
            **_MLP_BIAS,
            window="layer_types",
            rope="no_rope_layers",
            tied=True,
            rules=ConfigRules(
                may_be_null=("num_key_value_heads", "head_dim"),
                defaults={"num_key_value_heads": 4},
            ),
        ),
        _family(
            "SeedOssForCausalLM",
            "seed_oss",
            builder="llama",
            qkv=replace(_QKV, bias=Stated("attention_bias", True)),
            o=replace(_O_PROJ, bias="attention_out_bias"),
            **_MLP_BIAS,
            rules=ConfigRules(
                may_be_null=("num_key_value_heads", "head_dim"),
                defaults={"num_key_value_heads": 8, "head_dim": 128},
            ),
        ),
        _family("Olmo2ForCausalLM", "olmo2", builder="olmo2", **_OLMO),
        _family("Olmo3ForCausalLM", "olmo3", builder="olmo2", **_OLMO, window="layer_types"),
        _family(
            "Exaone4ForCausalLM",
            "exaone4",
            builder="olmo2",
            norms=(*_NORMS_AFTER, *_HEAD_NORMS),
            window="layer_types",
            rope="windows",
            rules=ConfigRules(may_be_null=("head_dim",), defaults={"num_key_value_heads": 32}),
        ),
        _family(
            "Glm4ForCausalLM",
            "glm4",
            builder="glm4",
            qkv=replace(_QKV, bias=Stated("attention_bias", True)),
            gate_up=replace(_GATE_UP, stored_fused=True),
            norms=(
                *_USUAL["norms"],
                Norm(name="post_self_attn_layernorm"),
                Norm(name="post_mlp_layernorm"),
            ),
            interleaved_rope=True,
            float16=False,
            rules=ConfigRules(defaults={"num_key_value_heads": 2, "head_dim": 128}),
        ),
        _family(
            "MixtralForCausalLM",
            "mixtral",
            builder="moe",
            experts=_experts(
                "block_sparse_moe",
                ("w1", "w3", "w2"),
                "intermediate_size",
                Router(normalized=True),
            ),
            norms=_norms_before("block_sparse_moe"),
            window="all",
        ),
        _family(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            builder="moe",
            qkv=replace(_QKV, bias=Stated("qkv_bias", True)),
            experts=_experts(
                "mlp",
                _NAMES,
                "moe_intermediate_size",
                _QWEN_ROUTER,
                shared=SharedExpert(
                    **_gated("mlp.shared_expert", *_NAMES, "shared_expert_intermediate_size"),
                    gate="mlp.shared_expert_gate",
                ),
                **_QWEN_DENSE,
            ),
            norms=_norms_before("mlp"),
            window="layer_types",
        ),
        _family(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            builder="moe",
            **_ATTENTION_BIAS,
            experts=_experts("mlp", _NAMES, "moe_intermediate_size", _QWEN_ROUTER, **_QWEN_DENSE),
            norms=(*_norms_before("mlp"), *_HEAD_NORMS),
            window="all",
        ),
        _family(
            "GptOssForCausalLM",
            "gpt_oss",
            builder="moe",
            qkv=replace(_QKV, bias=Stated("attention_bias", True)),
            o=replace(_O_PROJ, bias=Stated("attention_bias", True)),
            experts=_experts(
                "mlp",
                _NAMES,
                "intermediate_size",
                Router(name="router", scores="softmax_of_chosen", rounded=True, bias=True),
                fused=True,
                clamped=True,
            ),
            sinks="self_attn.sinks",
            norms=_norms_before("mlp"),
            window="layer_types",
            float16=False,
        ),
        _family(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            builder="moe",
            qkv=replace(_QKV, bias="attention_bias"),
            experts=_experts(
                "mlp",
                _NAMES,
                "moe_intermediate_size",
                Router(
                    scores="sigmoid",
                    normalized=Stated("norm_topk_prob", True),
                    float32=True,
                    correction="gate.e_score_correction_bias",
                    group_score="top2",
                    factor_key="routed_scaling_factor",
                ),
                shared=SharedExpert(**_gated("mlp.shared_experts", *_NAMES, "shared_experts")),
                first_dense_key="first_k_dense_replace",
            ),
            draft_layers_key="num_nextn_predict_layers",
            norms=(
                *_norms_before("mlp"),
                *(replace(norm, present="use_qk_norm") for norm in _HEAD_NORMS),
            ),
        ),
        _family(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            builder="qwen3_next",
            **_QWEN_HYBRID,
            delta_net=replace(
                _DELTA_NET,
                inputs=replace(_DELTA_NET.inputs, stored_fused=True),
                gates=replace(_DELTA_NET.gates, stored_fused=True),
                grouped=True,
            ),
            experts=_experts(
                "mlp",
                _NAMES,
                "moe_intermediate_size",
                _QWEN_ROUTER,
                shared=SharedExpert(
                    **_gated("mlp.shared_expert", *_NAMES, "shared_expert_intermediate_size"),
                    gate="mlp.shared_expert_gate",
                ),
                **_QWEN_DENSE,
            ),
            norms=(*_norms_before("mlp"), *_HEAD_NORMS),
        ),
        _family(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            builder="qwen3_next",
            **_QWEN_HYBRID,
            delta_net=_DELTA_NET,
            norms=(*_USUAL["norms"], *_HEAD_NORMS),
        ),
    )
}


def served_architectures() -> tuple[str, ...]:
    """What qserve serves."""
    return tuple(name for name, family in FAMILIES.items() if family.served)


def checked_family(config: Mapping[str, Any]) -> Family | None:
    """The family of config.json's model_type, where the doctor knows its rules."""
    for family in FAMILIES.values():
        if family.rules is not None and family.model_type == config.get("model_type"):
            return family
    return None
