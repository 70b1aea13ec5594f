"""Families with routed experts and full attention."""

GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.8}
GRANITE_MOE = {
    **{"num_local_experts": 6, "num_experts_per_tok": 3, "logits_scaling": 2.5},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "swiglu_limit": 0.5,
            "pad_token_id": 0,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.8,
            "pad_token_id": 0,
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0},
    ),
    "flex_olmo": (
        "FlexOlmoConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0, "norm_topk_prob": True},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            **{"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
            **{"moe_layer_start_index": 1, "tie_word_embeddings": True},
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    # queries of the last two layers see two blocks of 16 keys, their own and one more
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        {
            **{"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
            **{"intermediate_size": 32, "dense_intermediate_size": 96, "swiglu_limit": 0.5},
            **{"shared_intermediate_size": 64, "index_n_heads": 2, "index_head_dim": 32},
            **{"index_block_size": 16, "index_topk_blocks": 2, "pad_token_id": 0},
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "kolibri": (
        "Kolibri1Config",
        {
            **{"head_dim": 32, "sliding_window": 9, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
            **{"norm_topk_prob": True, "pad_token_id": 0},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "flint": (
        "FlintConfig",
        {
            **{"head_dim": 16, "sliding_window": 9, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
            **{"mlp_only_layers": [0], "pad_token_id": 0},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    # a dense layer that rotates without a window; shared experts
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {
            **{"head_dim": 16, "sliding_window": 9, "num_experts": 8, "num_experts_per_tok": 3},
            **{"intermediate_size": 32, "prefix_dense_intermediate_size": 64, "logit_scale": 0.5},
            **{"num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]},
            **{"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "dots1": (
        "Dots1Config",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
        },
    ),
    "granite_moe": ("GraniteMoeConfig", GRANITE_MOE),
    "granite_moe_shared": (
        "GraniteMoeSharedConfig",
        {**GRANITE_MOE, "shared_intermediate_size": 64, "tie_word_embeddings": True},
    ),
    "granite_moe_swa": (
        "GraniteMoeSWAConfig",
        {
            **GRANITE_MOE,
            **{"shared_intermediate_size": 64, "sliding_window": 9},
            "layer_rope_theta": [100.0, 0, 10000.0],
        },
    ),
    "laguna": (
        "LagunaConfig",
        {
            **{"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0},
            **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
            **{"moe_routed_scaling_factor": 1.7, "sliding_window": 9, "attention_bias": True},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_attention_heads_per_layer": [4, 8, 4],
        },
    ),
    # Layers with a window have other heads; the last two layers cut what their activations give.
    "step": (
        "Step3p7TextConfig",
        {
            **{
                "num_hidden_layers": 4,
                "head_dim": 32,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
            },
            **{"moe_intermediate_size": 32, "share_expert_dim": 64, "sliding_window": 9},
            **{
                "num_sliding_attention_heads": 8,
                "moe_router_scaling_factor": 1.7,
                "pad_token_id": 0,
            },
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "swiglu_limits": [0.0, None, 0.2, 0.3],
            "swiglu_limits_shared": [0.4, 0.0, 0.0, 0.25],
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "llama3", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
                    **{"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    # keys wider than values
    "mimo_v2": (
        "MiMoV2FlashConfig",
        {
            **{"head_dim": 48, "v_head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "sliding_window": 9, "attention_bias": True},
            **{"routed_scaling_factor": 1.7, "num_key_value_heads": 1, "pad_token_id": 0},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **{"head_dim": 32, "num_local_experts": 6, "intermediate_size_mlp": 128},
            **{"moe_layers": [0, 1], "no_rope_layer_interval": 2, "attention_chunk_size": 11},
            **{"floor_scale": 4, "attn_scale": 0.5},
        },
    ),
    "solar_open": (
        "SolarOpenConfig",
        {
            **{"head_dim": 32, "attention_bias": True, "n_routed_experts": 8},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2},
            **GROUPS,
        },
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            **{"head_dim": 32, "sliding_window": 9, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "num_shared_experts": 2, "sliding_window_pattern": 3},
            **GROUPS,
        },
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            **{"head_dim": 32, "sliding_window": 9, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "num_shared_experts": 2, "route_scale": 1.8},
            **{"num_dense_layers": 1, "global_attn_every_n_layers": 2, "mup_enabled": True},
        },
    ),
    "hunyuan_moe": ("HunYuanMoEV1Config", {"head_dim": 32, "num_experts": 6, "moe_topk": 2}),
    "phimoe": (
        "PhimoeConfig",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": True},
            **{"lm_head_bias": True, "pad_token_id": 0, "router_jitter_noise": 0.3},
        },
    ),
    "mellum": (
        "MellumConfig",
        {
            **{"head_dim": 32, "sliding_window": 9, "num_experts": 6, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse", "sparse"]},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "hy_v3": (
        "HYV3Config",
        {
            **{"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "num_shared_experts": 2},
        },
    ),
}
# also served by rows of other families: a few tests run them
ROWS = (
    "olmoe",
    "flex_olmo",
    "ernie4_5_moe",
    "dots1",
    "granite_moe_shared",
    "granite_moe_swa",
    "laguna",
    "step",
    "mimo_v2",
    "solar_open",
    "exaone_moe",
    "afmoe",
    "hunyuan_moe",
    "phimoe",
    "mellum",
    "hy_v3",
    "flint",
    "cohere2_moe",
)
