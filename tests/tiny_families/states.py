"""Families whose layers have states: delta nets, Mamba-2, short convolutions."""

# Four value heads to two key heads, each kind with a width of its own; a gate for each head.
DELTA = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
# Short convolutions of three taps; the width of the feed-forward is adjusted from the stated one.
SHORT_CONV = {
    "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# Mamba-2 with two groups; widths of states and of heads that differ.
MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 22},
    **{"mamba_chunk_size": 16, "layer_types": ["mamba", "attention", "mamba"]},
}
FAMILIES = {
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            **{name: value for name, value in DELTA.items() if name != "head_dim"},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": None}, "pad_token_id": 0},
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {**SHORT_CONV, "intermediate_size": 128, "block_multiple_of": 32},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **SHORT_CONV,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.8,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            **{"shared_intermediate_size": 96, "num_local_experts": 0},
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
        },
    ),
    "granite_hybrid_moe": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            **{"intermediate_size": 32, "shared_intermediate_size": 96},
            **{"num_local_experts": 6, "num_experts_per_tok": 2},
            **{"residual_multiplier": 0.4, "attention_multiplier": 0.1},
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 22},
            **{"head_dim": 32, "chunk_size": 16, "num_hidden_layers": 4},
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        },
    ),
    "nemotron_h_moe": (
        "NemotronHConfig",
        {
            **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 22},
            **{"head_dim": 32, "chunk_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
            **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.8},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        },
    ),
    "nemotron_h_latent": (
        "NemotronHConfig",
        {
            **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 22},
            **{"head_dim": 32, "chunk_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96},
            **{"moe_latent_size": 32, "routed_scaling_factor": 1.8},
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
        },
    ),
    "bamba": (
        "BambaConfig",
        {
            **{name: value for name, value in MAMBA.items() if name != "layer_types"},
            "attn_layer_indices": [1],
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **{name: value for name, value in MAMBA.items() if name != "layer_types"},
            **{"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
            **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.6},
            **{"attention_in_multiplier": 1.5, "attention_out_multiplier": 0.7},
            **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8},
            **{"ssm_multipliers": [0.7, 1.2, 0.6, 1.4, 0.9], "mlp_multipliers": [1.6, 0.5]},
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **{
                "kv_lora_rank": 64,
                "qk_nope_head_dim": 24,
                "qk_rope_head_dim": 16,
                "v_head_dim": 40,
            },
            **{"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_token": 3},
            **{"moe_intermediate_size": 32, "num_shared_experts": 2, "pad_token_id": 0},
            **{"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 1.8},
            **{"linear_num_heads": 6, "linear_head_dim": 32},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            **{"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "block_size": 16},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **{"linear_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 0.8},
            **{"full_attn_alpha_factor": 1.2, "full_attn_beta_factor": 0.7},
            **{"mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.3},
        },
    ),
}
FAMILIES["ling_3"] = (
    "BailingHybridConfig",
    {
        **{"kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 40},
        **{"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 3},
        **{"moe_intermediate_size": 32, "n_shared_experts": 2, "pad_token_id": 0},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.8, "head_dim": 32},
        **{"layer_group_size": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0},
        **{"rope_theta": 100.0, "kda_lower_bound": -3.0},
    },
)
FAMILIES["lfm3"] = (
    "Lfm3Config",
    {
        **{"head_dim": 32, "sliding_window": 9, "tie_word_embeddings": True, "conv_L_cache": 7},
        **{"num_hidden_layers": 4, "attention_bias": True, "pad_token_id": 0},
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    },
)
# A window of 9 keys, biases up to distance 12; both kinds of layers, with other heads; two shared
# experts, which the router weighs.
FAMILIES["inkling"] = (
    "InklingTextConfig",
    {
        **{"head_dim": 32, "swa_head_dim": 32, "num_key_value_heads": 2, "d_rel": 5},
        **{"swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "sliding_window_size": 9},
        **{"rel_extent": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "route_scale": 1.8},
        **{"moe_intermediate_size": 32, "n_shared_experts": 2, "logits_mup_width_multiplier": 2.5},
        **{"log_scaling_n_floor": 7, "log_scaling_alpha": 0.4, "pad_token_id": 0},
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
)
# Mamba-1: nine inputs of the step sizes, states of 11 numbers, three taps.
MAMBA_1 = {
    **{"state_size": 11, "conv_kernel": 3, "time_step_rank": 9, "layer_norm_epsilon": 1e-3},
    "tie_word_embeddings": True,
}
FAMILIES["mamba"] = ("MambaConfig", MAMBA_1)
FAMILIES["falcon_mamba"] = ("FalconMambaConfig", {**MAMBA_1, "mixer_rms_eps": 1e-2})
FAMILIES["jamba"] = (
    "JambaConfig",
    {
        **{"mamba_d_state": 11, "mamba_d_conv": 3, "mamba_dt_rank": 9, "rms_norm_eps": 1e-3},
        **{"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2},
        **{"expert_layer_offset": 1, "num_experts": 6, "num_experts_per_tok": 2},
        "num_hidden_layers": 4,
    },
)
FAMILIES["mamba2"] = (
    "Mamba2Config",
    {
        **{"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 22, "conv_kernel": 3},
        **{"layer_norm_epsilon": 1e-3, "chunk_size": 16},
    },
)
