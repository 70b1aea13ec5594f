"""Architectures with experts, and those of latent attention."""

from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.parts import (
    ATTENTION_BIAS,
    BEFORE,
    EXPERTS,
    LATE_NAME,
    OF_HEADS,
    OF_LATENTS,
)

MIXTURES = (
    Architecture(
        name="qwen2moe",
        family="Qwen2MoeForCausalLM",
        keys={
            **EXPERTS,
            "num_experts": "expert_count",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        fixed={"norm_topk_prob": False, "use_sliding_window": False, "decoder_sparse_step": 1},
    ),
    Architecture(
        name="qwen3moe",
        family="Qwen3MoeForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        keys={**EXPERTS, "num_experts": "expert_count"},
        fixed={"norm_topk_prob": True, "use_sliding_window": False, "decoder_sparse_step": 1},
        bias_keys=ATTENTION_BIAS,
    ),
    Architecture(
        name="gpt-oss",
        family="GptOssForCausalLM",
        norms=LATE_NAME,
        keys={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        window="pattern",
        pattern=2,
        bias_keys=ATTENTION_BIAS,
    ),
    # DeepSeek-V2, V3, R1, Moonlight, Kimi-K2, GLM-4.7-Flash
    Architecture(
        name="deepseek2",
        family="DeepseekV2ForCausalLM",
        with_sigmoid="DeepseekV3ForCausalLM",
        also=("Glm4MoeLiteForCausalLM",),
        norms={**BEFORE, **OF_LATENTS},
        keys={
            **EXPERTS,
            "kv_lora_rank": "attention.kv_lora_rank",
            "n_routed_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "first_k_dense_replace": "leading_dense_block_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        fixed={
            **{"routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
            **{"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
        },
    ),
    Architecture(
        name="glm4moe",
        family="Glm4MoeForCausalLM",
        norms={**LATE_NAME, **OF_HEADS},
        keys={
            **EXPERTS,
            "n_routed_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        fixed={"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
        bias_keys={**ATTENTION_BIAS, "use_qk_norm": "attn_q_norm.weight"},
    ),
)
