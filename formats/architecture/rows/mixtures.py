"""Rows of families with experts."""

from dataclasses import replace

from formats.architecture.experts import Router, SharedExpert
from formats.architecture.flags import Equals, Stated
from formats.architecture.rows.classic_parts import (
    ERNIE_MOE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    HUNYUAN_MOE,
    LLAMA_4,
)
from formats.architecture.rows.parts import (
    ATTENTION_BIAS,
    GROUPED_ROUTER,
    HEAD_NORMS,
    MINIMAX_M2,
    NAMES,
    O_PROJ,
    QKV,
    QWEN_DENSE,
    QWEN_ROUTER,
    WHOLE_NORMS,
    experts,
    gated,
    norms_before,
)
from formats.architecture.rows.usual import family_row

MIXTURES = (
    family_row(
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
    family_row(
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
    family_row(
        "Qwen3MoeForCausalLM",
        "Qwen3-MoE",
        "qwen3_moe",
        builder="moe",
        **ATTENTION_BIAS,
        experts=experts("mlp", NAMES, "moe_intermediate_size", QWEN_ROUTER, **QWEN_DENSE),
        norms=(*norms_before("mlp"), *HEAD_NORMS),
        window="all",
    ),
    family_row(
        "OlmoeForCausalLM",
        "OLMoE",
        "olmoe",
        builder="moe",
        **ATTENTION_BIAS,
        experts=experts("mlp", NAMES, "intermediate_size", QWEN_ROUTER),
        norms=(*norms_before("mlp"), *WHOLE_NORMS),
        fixed={"clip_qkv": None},
    ),
    family_row("GraniteMoeForCausalLM", "GraniteMoE", "granitemoe", **GRANITE_MOE),
    family_row(
        "GraniteMoeSharedForCausalLM",
        "GraniteMoE with shared experts",
        "granitemoeshared",
        **GRANITE_MOE_SHARED,
        variants=((Equals("shared_intermediate_size", 0), {"experts": GRANITE_MOE["experts"]}),),
    ),
    family_row("HunYuanMoEV1ForCausalLM", "Hunyuan MoE", "hunyuan_v1_moe", **HUNYUAN_MOE),
    family_row(
        "Ernie4_5_MoeForCausalLM", "ERNIE 4.5 MoE", "ernie4_5_moe", builder="moe", **ERNIE_MOE
    ),
    family_row("MiniMaxM2ForCausalLM", "MiniMax-M2", "minimax_m2", builder="moe", **MINIMAX_M2),
    family_row(
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
    family_row(
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
    family_row(
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
    family_row("Llama4ForCausalLM", "Llama 4 (text)", "llama4_text", builder="llama4", **LLAMA_4),
)
