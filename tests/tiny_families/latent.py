"""Families with latent attention; some of them select keys."""

from tests.tiny_families.experts import GROUPS

# Latent attention: widths that differ from each other.
LATENT = {
    **{"kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 40},
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0},
    **{"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.8},
}
# no context of the tests is longer than what a query selects
INDEXER = {"index_topk": 128, "index_n_heads": 2, "index_head_dim": 32, "q_lora_rank": 96}
COMPRESSED = {
    **{"num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 96, "intermediate_size": 32},
    **{"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3},
    "layer_types": [
        *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    **{"o_groups": 2, "o_lora_rank": 32, "partial_rotary_factor": 0.5, "sliding_window": 7},
    # so many heads that no two entries have the score 0
    **{"index_n_heads": 16, "index_head_dim": 32, "index_topk": 3, "swiglu_limit": 1.5},
    "rope_parameters": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        **{"beta_fast": 32.0, "beta_slow": 1.0},
    },
}
# Two geometries. One layer with a window comes before the last one without.
DOTS = {
    **{"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
    **{"v_head_dim": 40, "head_dim": 40, "num_key_value_heads": 4, "sliding_window": 9},
    **{"swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "swa_q_lora_rank": 64},
    **{"swa_kv_lora_rank": 96, "swa_qk_nope_head_dim": 32, "swa_head_dim": 48},
    **{"swa_v_head_dim": 40, "swa_qk_rope_head_dim": 16, "swa_rope_theta": 300.0},
    **{"index_topk": 128, "index_n_heads": 16, "index_head_dim": 32, "rope_theta": 20000.0},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
    **{"moe_intermediate_size": 32, "n_shared_experts": 2, "routed_scaling_factor": 1.8},
    "shared_experts_intermediate_size": 48,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "pad_token_id": 0,
}
FAMILIES = {
    # queries of their own, one group
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.8,
            "rope_parameters": YARN,
        },
    ),
    # latents of queries, groups, the factor of YaRN twice
    "deepseek_v3": (
        "DeepseekV3Config",
        {**LATENT, **GROUPS, "q_lora_rank": 96, "rope_parameters": YARN},
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
            **{**GROUPS, **INDEXER, "rope_parameters": YARN},
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    # each type of attention; windows end within pages of 16 and 8 tokens, and go over their ends
    "deepseek_v4": ("DeepseekV4Config", COMPRESSED),
    "dots3": ("Dots3NoteTextConfig", DOTS),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**LATENT, "q_lora_rank": 96, "n_group": 1, "topk_group": 1, "pad_token_id": 0},
    ),
    "axk1": ("AXK1Config", {**LATENT, **GROUPS, "q_lora_rank": 96, "pad_token_id": 0}),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {**LATENT, **INDEXER, "n_group": 1, "topk_group": 1, "pad_token_id": 0},
    ),
    "minicpm3": (
        "MiniCPM3Config",
        {
            **{"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
            **{"v_head_dim": 40, "q_lora_rank": 96, "num_key_value_heads": 4},
            **{"scale_emb": 3, "scale_depth": 0.8, "dim_model_base": 32, "mlp_bias": True},
            "tie_word_embeddings": True,
        },
    ),
    "mistral4": (
        "Mistral4Config",
        {
            **LATENT,
            **{"q_lora_rank": 96, **GROUPS},
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.6},
        },
    ),
    "youtu": (
        "YoutuConfig",
        {
            **{"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
            **{"v_head_dim": 40, "q_lora_rank": 96, "num_key_value_heads": 4},
            "tie_word_embeddings": True,
        },
    ),
}
# also served by rows of other families: a few tests run them
ROWS = (
    "deepseek_v32",
    "glm_moe_dsa",
    "minicpm3",
    "mistral4",
    "youtu",
)
