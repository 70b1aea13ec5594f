"""Table of all model families, one row each: names, shapes, biases, norms and splits.

All four packages read it. The model code of a served family is in qserve/model/families/.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.architecture.classic_parts import (
    BLOOM,
    ERNIE,
    ERNIE_MOE,
    FALCON,
    GPT2,
    GPT_BIGCODE,
    GPT_J,
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    HUNYUAN,
    HUNYUAN_MOE,
    LLAMA_4,
    MPT,
)
from formats.architecture.family import (
    ConfigRules,
    Family,
    Norm,
    Positions,
    Router,
    SharedExpert,
)
from formats.architecture.family_parts import (
    ATTENTION_BIAS,
    COHERE,
    GATE_UP,
    GEMMA,
    GEMMA_1,
    GEMMA_4,
    GEMMA_NORMS,
    GPT_NEOX,
    GROUPED_ROUTER,
    HEAD_NORMS,
    MINIMAX_M2,
    MISTRAL,
    MLP_BIAS,
    NAMES,
    NORMS_AFTER,
    O_PROJ,
    OLMO,
    OPT,
    PHI,
    QKV,
    QWEN_DENSE,
    QWEN_HYBRID,
    QWEN_ROUTER,
    STABLELM,
    STARCODER_BIAS,
    USUAL,
    WHOLE_NORMS,
    experts,
    gated,
    norms_before,
    ungated,
)
from formats.architecture.flags import Equals, Stated
from formats.architecture.latent_parts import DEEPSEEK_V2, DEEPSEEK_V3, GLM_LITE
from formats.architecture.states.parts import (
    DELTA_NET,
    FALCON_H1,
    GRANITE_HYBRID,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
)


def _family(architecture: str, title: str, model_type: str, **different: Any) -> Family:
    """Return the usual row with some fields replaced."""
    return Family(
        architecture=architecture, title=title, model_type=model_type, **{**USUAL, **different}
    )


QWEN_SHARED = SharedExpert(
    **gated("mlp.shared_expert", *NAMES, "shared_expert_intermediate_size"),
    gate="mlp.shared_expert_gate",
)
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        _family(
            "LlamaForCausalLM",
            "Llama",
            "llama",
            builder="llama",
            **ATTENTION_BIAS,
            **MLP_BIAS,
            rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
        ),
        _family("MistralForCausalLM", "Mistral", "mistral", builder="llama", **MISTRAL),
        _family(
            "MinistralForCausalLM",
            "Ministral",
            "ministral",
            builder="llama",
            **{**MISTRAL, "window": "layer_types"},
        ),
        _family(
            "Ministral3ForCausalLM",
            "Ministral 3",
            "ministral3",
            builder="ministral3",
            window="all",
            rules=ConfigRules(defaults={"num_key_value_heads": 8, "head_dim": 128}),
        ),
        _family(
            "Qwen2ForCausalLM",
            "Qwen2",
            "qwen2",
            builder="llama",
            qkv=replace(QKV, bias=True),
            window="layer_types",
            rules=ConfigRules(
                may_be_null=("num_key_value_heads", "head_dim"),
                defaults={"num_key_value_heads": 32},
            ),
        ),
        _family(
            "Qwen3ForCausalLM",
            "Qwen3",
            "qwen3",
            builder="qwen3",
            **ATTENTION_BIAS,
            norms=(*USUAL["norms"], *HEAD_NORMS),
            window="layer_types",
            rules=ConfigRules(
                may_be_null=("num_key_value_heads",),
                defaults={"num_key_value_heads": 32, "head_dim": 128},
            ),
        ),
        _family(
            "Phi3ForCausalLM",
            "Phi-3 and Phi-4",
            "phi3",
            builder="llama",
            qkv=replace(QKV, stored_fused=True),
            gate_up=replace(GATE_UP, stored_fused=True),
            window="all",
            rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
        ),
        _family("GemmaForCausalLM", "Gemma", "gemma", builder="llama", **GEMMA_1),
        _family(
            "Gemma2ForCausalLM", "Gemma 2", "gemma2", builder="gemma2", **GEMMA, norms=GEMMA_NORMS
        ),
        _family(
            "Gemma3ForCausalLM",
            "Gemma 3 (text)",
            "gemma3_text",
            builder="gemma3",
            **GEMMA,
            norms=(*GEMMA_NORMS, *HEAD_NORMS),
        ),
        _family("Gemma4ForCausalLM", "Gemma 4 (text)", "gemma4_text", builder="gemma4", **GEMMA_4),
        _family(
            "GraniteForCausalLM",
            "Granite",
            "granite",
            **GRANITE,
            **MLP_BIAS,
            rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
        ),
        _family(
            "SmolLM3ForCausalLM",
            "SmolLM3",
            "smollm3",
            builder="llama",
            **ATTENTION_BIAS,
            **MLP_BIAS,
            window="layer_types",
            rope="no_rope_layers",
            tied=True,
            rules=ConfigRules(
                may_be_null=("num_key_value_heads", "head_dim"),
                defaults={"num_key_value_heads": 4},
            ),
        ),
        _family("HunYuanDenseV1ForCausalLM", "Hunyuan", "hunyuan_v1_dense", **HUNYUAN),
        _family(
            "SeedOssForCausalLM",
            "Seed-OSS",
            "seed_oss",
            builder="llama",
            qkv=replace(QKV, bias=Stated("attention_bias", True)),
            o=replace(O_PROJ, bias="attention_out_bias"),
            **MLP_BIAS,
            rules=ConfigRules(
                may_be_null=("num_key_value_heads", "head_dim"),
                defaults={"num_key_value_heads": 8, "head_dim": 128},
            ),
        ),
        _family(
            "ArceeForCausalLM",
            "Arcee",
            "arcee",
            builder="llama",
            **ATTENTION_BIAS,
            **ungated("mlp.up_proj", "mlp.down_proj", "mlp_bias"),
            norms=norms_before("mlp.up_proj"),
            activations=("relu2",),
        ),
        _family("Ernie4_5ForCausalLM", "ERNIE 4.5", "ernie4_5", builder="llama", **ERNIE),
        _family("Olmo2ForCausalLM", "OLMo 2", "olmo2", builder="olmo2", **OLMO),
        _family(
            "Olmo3ForCausalLM", "OLMo 3", "olmo3", builder="olmo2", **OLMO, window="layer_types"
        ),
        _family(
            "Exaone4ForCausalLM",
            "EXAONE 4",
            "exaone4",
            builder="olmo2",
            norms=(*NORMS_AFTER, *HEAD_NORMS),
            window="layer_types",
            rope="windows",
            rules=ConfigRules(may_be_null=("head_dim",), defaults={"num_key_value_heads": 32}),
        ),
        _family(
            "GlmForCausalLM",
            "GLM-4 9B (ChatGLM)",
            "glm",
            builder="llama",
            qkv=replace(QKV, bias=Stated("attention_bias", True)),
            gate_up=replace(GATE_UP, stored_fused=True),
            interleaved_rope=True,
            float16=False,
        ),
        _family(
            "Glm4ForCausalLM",
            "GLM-4",
            "glm4",
            builder="glm4",
            qkv=replace(QKV, bias=Stated("attention_bias", True)),
            gate_up=replace(GATE_UP, stored_fused=True),
            norms=(
                *USUAL["norms"],
                Norm(name="post_self_attn_layernorm"),
                Norm(name="post_mlp_layernorm"),
            ),
            interleaved_rope=True,
            float16=False,
            rules=ConfigRules(defaults={"num_key_value_heads": 2, "head_dim": 128}),
        ),
        _family(
            "CohereForCausalLM",
            "Cohere (Command R)",
            "cohere",
            builder="cohere",
            **COHERE,
            fixed={"use_qk_norm": False},
        ),
        _family(
            "Cohere2ForCausalLM",
            "Cohere 2",
            "cohere2",
            builder="cohere",
            **COHERE,
            window="layer_types",
            rope="windows",
        ),
        _family(
            "OPTForCausalLM",
            "OPT",
            "opt",
            builder="opt",
            **OPT,
            norm_kind="layer",
            norm_bias=True,
            norm_eps_key="",
            activation_key="activation_function",
            activations=("relu", "gelu"),
            inner_key="ffn_dim",
            rope="none",
            positions=Positions(name="model.decoder.embed_positions.weight", offset=2),
            tied=True,
            fixed={
                "do_layer_norm_before": True,
                "_remove_final_layer_norm": False,
                "layer_norm_elementwise_affine": True,
            },
            like_hidden_size=("word_embed_proj_dim",),
            layer="model.decoder.layers.{i}",
            embedding="model.decoder.embed_tokens.weight",
            last_norm="model.decoder.final_layer_norm.weight",
        ),
        _family("StableLmForCausalLM", "StableLM", "stablelm", builder="llama", **STABLELM),
        _family("PhiForCausalLM", "Phi", "phi", builder="cohere", **PHI),
        _family(
            "GPTNeoXForCausalLM", "GPT-NeoX (Pythia)", "gpt_neox", builder="gpt_neox", **GPT_NEOX
        ),
        _family("GPT2LMHeadModel", "GPT-2", "gpt2", builder="gpt2", **GPT2),
        _family(
            "GPTBigCodeForCausalLM",
            "GPT-BigCode (StarCoder)",
            "gpt_bigcode",
            builder="gpt2",
            **GPT_BIGCODE,
        ),
        _family("GPTJForCausalLM", "GPT-J", "gptj", builder="gpt2", **GPT_J),
        _family("BloomForCausalLM", "BLOOM", "bloom", builder="gpt2", **BLOOM),
        _family("MptForCausalLM", "MPT", "mpt", builder="gpt2", **MPT),
        _family("FalconForCausalLM", "Falcon", "falcon", builder="falcon", **FALCON),
        _family(
            "Starcoder2ForCausalLM",
            "StarCoder 2",
            "starcoder2",
            builder="llama",
            qkv=replace(QKV, bias=STARCODER_BIAS),
            o=replace(O_PROJ, bias=STARCODER_BIAS),
            **ungated("mlp.c_fc", "mlp.c_proj", STARCODER_BIAS),
            norms=norms_before("mlp.c_fc"),
            norm_kind="layer",
            norm_bias=True,
            norm_eps_key="norm_epsilon",
            activations=("gelu_pytorch_tanh", "gelu", "gelu_new"),
            window="all",
            tied=True,
        ),
        _family(
            "NemotronForCausalLM",
            "Nemotron",
            "nemotron",
            builder="llama",
            **ATTENTION_BIAS,
            **ungated("mlp.up_proj", "mlp.down_proj", "mlp_bias"),
            norms=norms_before("mlp.up_proj"),
            norm_kind="layer",
            norm_bias=True,
            norm_offset=1.0,
            norm_eps_key="norm_eps",
            activations=("relu2",),
        ),
        _family(
            "MixtralForCausalLM",
            "Mixtral",
            "mixtral",
            builder="moe",
            experts=experts(
                "block_sparse_moe",
                ("w1", "w3", "w2"),
                "intermediate_size",
                Router(normalized=True),
            ),
            norms=norms_before("block_sparse_moe"),
            window="all",
        ),
        _family(
            "Qwen2MoeForCausalLM",
            "Qwen2-MoE",
            "qwen2_moe",
            builder="moe",
            qkv=replace(QKV, bias=Stated("qkv_bias", True)),
            experts=experts(
                "mlp",
                NAMES,
                "moe_intermediate_size",
                QWEN_ROUTER,
                shared=SharedExpert(
                    **gated("mlp.shared_expert", *NAMES, "shared_expert_intermediate_size"),
                    gate="mlp.shared_expert_gate",
                ),
                **QWEN_DENSE,
            ),
            norms=norms_before("mlp"),
            window="layer_types",
        ),
        _family(
            "Qwen3MoeForCausalLM",
            "Qwen3-MoE",
            "qwen3_moe",
            builder="moe",
            **ATTENTION_BIAS,
            experts=experts("mlp", NAMES, "moe_intermediate_size", QWEN_ROUTER, **QWEN_DENSE),
            norms=(*norms_before("mlp"), *HEAD_NORMS),
            window="all",
        ),
        _family(
            "OlmoeForCausalLM",
            "OLMoE",
            "olmoe",
            builder="moe",
            **ATTENTION_BIAS,
            experts=experts("mlp", NAMES, "intermediate_size", QWEN_ROUTER),
            norms=(*norms_before("mlp"), *WHOLE_NORMS),
            fixed={"clip_qkv": None},
        ),
        _family("GraniteMoeForCausalLM", "GraniteMoE", "granitemoe", **GRANITE_MOE),
        _family(
            "GraniteMoeSharedForCausalLM",
            "GraniteMoE with shared experts",
            "granitemoeshared",
            **GRANITE_MOE_SHARED,
            variants=(
                (Equals("shared_intermediate_size", 0), {"experts": GRANITE_MOE["experts"]}),
            ),
        ),
        _family("HunYuanMoEV1ForCausalLM", "Hunyuan MoE", "hunyuan_v1_moe", **HUNYUAN_MOE),
        _family(
            "Ernie4_5_MoeForCausalLM", "ERNIE 4.5 MoE", "ernie4_5_moe", builder="moe", **ERNIE_MOE
        ),
        _family("MiniMaxM2ForCausalLM", "MiniMax-M2", "minimax_m2", builder="moe", **MINIMAX_M2),
        _family(
            "GptOssForCausalLM",
            "gpt-oss",
            "gpt_oss",
            builder="moe",
            qkv=replace(QKV, bias=Stated("attention_bias", True)),
            o=replace(O_PROJ, bias=Stated("attention_bias", True)),
            experts=experts(
                "mlp",
                NAMES,
                "intermediate_size",
                Router(name="router", scores="softmax_of_chosen", rounded=True, bias=True),
                fused=True,
                clamped=True,
            ),
            sinks="self_attn.sinks",
            norms=norms_before("mlp"),
            window="layer_types",
            float16=False,
        ),
        _family(
            "Glm4MoeForCausalLM",
            "GLM-4.5",
            "glm4_moe",
            builder="moe",
            qkv=replace(QKV, bias="attention_bias"),
            experts=experts(
                "mlp",
                NAMES,
                "moe_intermediate_size",
                replace(GROUPED_ROUTER, normalized=Stated("norm_topk_prob", True)),
                shared=SharedExpert(**gated("mlp.shared_experts", *NAMES, "shared_experts")),
                first_dense_key="first_k_dense_replace",
            ),
            draft_layers_key="num_nextn_predict_layers",
            norms=(
                *norms_before("mlp"),
                *(replace(norm, present="use_qk_norm") for norm in HEAD_NORMS),
            ),
        ),
        _family(
            "Dots1ForCausalLM",
            "dots.llm1",
            "dots1",
            builder="moe",
            **ATTENTION_BIAS,
            experts=experts(
                "mlp",
                NAMES,
                "moe_intermediate_size",
                GROUPED_ROUTER,
                shared=SharedExpert(**gated("mlp.shared_experts", *NAMES, "shared_experts")),
                first_dense_key="first_k_dense_replace",
            ),
            norms=(*norms_before("mlp"), *HEAD_NORMS),
            window="layer_types",
        ),
        _family("Llama4ForCausalLM", "Llama 4 (text)", "llama4_text", builder="llama4", **LLAMA_4),
        _family("DeepseekV2ForCausalLM", "DeepSeek-V2", "deepseek_v2", **DEEPSEEK_V2),
        _family(
            "DeepseekV3ForCausalLM",
            "DeepSeek-V3 (R1, Moonlight, Kimi-K2)",
            "deepseek_v3",
            **DEEPSEEK_V3,
        ),
        _family("Glm4MoeLiteForCausalLM", "GLM-4.7-Flash", "glm4_moe_lite", **GLM_LITE),
        _family(
            "Qwen3NextForCausalLM",
            "Qwen3-Next",
            "qwen3_next",
            builder="hybrid.qwen3_next",
            **QWEN_HYBRID,
            state_mixer=replace(
                DELTA_NET,
                inputs=replace(DELTA_NET.inputs, stored_fused=True),
                gates=replace(DELTA_NET.gates, stored_fused=True),
                grouped=True,
            ),
            experts=experts(
                "mlp",
                NAMES,
                "moe_intermediate_size",
                QWEN_ROUTER,
                shared=QWEN_SHARED,
                **QWEN_DENSE,
            ),
            norms=(*norms_before("mlp"), *HEAD_NORMS),
        ),
        _family(
            "Qwen3_5ForCausalLM",
            "Qwen3.5 (text)",
            "qwen3_5_text",
            builder="hybrid.qwen3_next",
            **QWEN_HYBRID,
            state_mixer=DELTA_NET,
            norms=(*USUAL["norms"], *HEAD_NORMS),
        ),
        _family(
            "Qwen3_5MoeForCausalLM",
            "Qwen3.5-MoE and Qwen3.6 (text)",
            "qwen3_5_moe_text",
            builder="hybrid.qwen3_next",
            **QWEN_HYBRID,
            inner_key="moe_intermediate_size",  # no layer has a dense feed-forward
            state_mixer=DELTA_NET,
            experts=experts(
                "mlp",
                NAMES,
                "moe_intermediate_size",
                replace(QWEN_ROUTER, normalized=True),
                shared=QWEN_SHARED,
            ),
            norms=(*norms_before("mlp"), *HEAD_NORMS),
        ),
        _family("Lfm2ForCausalLM", "LFM2", "lfm2", builder="hybrid.lfm2", **LFM2),
        _family("Lfm2MoeForCausalLM", "LFM2-MoE", "lfm2_moe", builder="hybrid.lfm2", **LFM2_MOE),
        _family(
            "GraniteMoeHybridForCausalLM",
            "Granite 4 (hybrid)",
            "granitemoehybrid",
            builder="hybrid.granite",
            **GRANITE_HYBRID,
        ),
        _family(
            "FalconH1ForCausalLM", "Falcon-H1", "falcon_h1", builder="hybrid.falcon_h1", **FALCON_H1
        ),
        _family(
            "NemotronHForCausalLM",
            "Nemotron-H (without experts)",
            "nemotron_h",
            builder="hybrid.nemotron_h",
            **NEMOTRON_H,
        ),
    )
}


def served_architectures() -> tuple[str, ...]:
    """Return the architectures that qserve serves."""
    return tuple(name for name, family in FAMILIES.items() if family.served)


def known_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of config.json's model_type, or else of its only architecture."""
    names = config.get("architectures")
    is_one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    return checked_family(config) or (FAMILIES.get(names[0]) if is_one else None)


def checked_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of config.json's model_type if its config rules are known."""
    for family in FAMILIES.values():
        if family.rules is not None and family.model_type == config.get("model_type"):
            return family
    return None
