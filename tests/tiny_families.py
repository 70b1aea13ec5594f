"""Configs of the tiny random models of each family, and what the families do not support."""

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    # Larger than usual: the outputs of a random model then differ from token to token.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
GEMMA = {
    "head_dim": 16,
    "sliding_window": 9,
    # not head_dim, so that the one is not taken for the other
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
# their own names of the sizes; a width of the feed-forward that is not 4 times the hidden size
GPT = {
    **{"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96},
}
FALCON_RW = {
    **{"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
    **{"num_key_value_heads": 4, "tie_word_embeddings": True},
}
FALCON = {"ffn_hidden_size": 96, "tie_word_embeddings": True}
NEOX = {"hidden_act": "gelu"}
# family -> config class and what it adds; windows shorter than the prompts, so that they matter
TINY_FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "ministral": (
        "MinistralConfig",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.6,
            },
        },
    ),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "gemma2": (
        "Gemma2Config",
        # scores and logits of a tiny model are small: with the usual caps nothing bends
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32}),
    "olmo2": ("Olmo2Config", {"pad_token_id": 0}),
    "olmo3": (
        "Olmo3Config",
        {
            "pad_token_id": 0,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 9, "sliding_window_pattern": 3}),
    "glm4": (
        "Glm4Config",
        {"head_dim": 32, "pad_token_id": 0, "partial_rotary_factor": 0.5},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
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
}

# Four value heads to two key heads, each kind with a width of its own; a gate for each head.
DELTA = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
# Latent attention: widths that differ from each other.
LATENT = {
    **{"kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 40},
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1},
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.8}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0},
    **{"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.8},
}
TINY_FAMILIES |= {
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
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2},
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 9}),
    "gemma": ("GemmaConfig", {"head_dim": 16, "tie_word_embeddings": True}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "phi": ("PhiConfig", {"intermediate_size": 128}),
    "gpt_neox": ("GPTNeoXConfig", {**NEOX, "rotary_pct": 0.5, "initializer_range": 0.3}),
    "nemotron": ("NemotronConfig", {}),
    "gpt2": ("GPT2Config", {**GPT, "tie_word_embeddings": True}),
    "gpt_bigcode": ("GPTBigCodeConfig", {**GPT, "tie_word_embeddings": True}),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    "falcon": ("FalconConfig", FALCON),
    "falcon_rw": ("FalconConfig", FALCON_RW),
    "arcee": ("ArceeConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32, "use_bias": True}),
    "glm": ("GlmConfig", {"head_dim": 32, "pad_token_id": 0}),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            **{"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
            **{"moe_layer_start_index": 1, "tie_word_embeddings": True},
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 32,
            "rope_parameters": {
                **{"rope_type": "dynamic", "rope_theta": 10000.0},
                **{"alpha": 50.0, "factor": 1.0},
            },
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
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
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**LATENT, "q_lora_rank": 96, "n_group": 1, "topk_group": 1, "pad_token_id": 0},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "cohere2": (
        "Cohere2Config",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
# Short convolutions of three taps; the width of the feed-forward is adjusted from the stated one.
SHORT_CONV = {
    "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
TINY_FAMILIES |= {
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
}
# Mamba-2 with two groups; widths of states and of heads that differ.
MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 22},
    **{"mamba_chunk_size": 16, "layer_types": ["mamba", "attention", "mamba"]},
}
TINY_FAMILIES |= {
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
            **{"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 96},
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
}
GRANITE_MOE = {
    **{"num_local_experts": 6, "num_experts_per_tok": 3, "logits_scaling": 2.5},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1},
}
GEMMA_4 = {
    **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
    **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 9},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    **{"tie_word_embeddings": True, "final_logit_softcapping": 3.0},
}
TINY_FAMILIES |= {
    "granite_moe": ("GraniteMoeConfig", GRANITE_MOE),
    "granite_moe_shared": (
        "GraniteMoeSharedConfig",
        {**GRANITE_MOE, "shared_intermediate_size": 64, "tie_word_embeddings": True},
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "sliding_window": 9},
            **{"attention_multiplier": 0.1, "logits_scaling": 2.5, "mlp_bias": True},
            **{"layer_rope_theta": [0, 100.0, 10000.0], "tie_word_embeddings": True},
        },
    ),
    "granite_moe_swa": (
        "GraniteMoeSWAConfig",
        {
            **GRANITE_MOE,
            **{"shared_intermediate_size": 64, "sliding_window": 9},
            "layer_rope_theta": [100.0, 0, 10000.0],
        },
    ),
    "olmo": ("OlmoConfig", {"pad_token_id": 0}),
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
    # sizes that no key of theirs states
    "bloom": ("BloomConfig", {"tie_word_embeddings": True}),
    "mpt": ("MptConfig", {"tie_word_embeddings": True, "max_seq_len": 256}),
    "llama4": (
        "Llama4TextConfig",
        {
            **{"head_dim": 32, "num_local_experts": 6, "intermediate_size_mlp": 128},
            **{"moe_layers": [0, 1], "no_rope_layer_interval": 2, "attention_chunk_size": 11},
            **{"floor_scale": 4, "attn_scale": 0.5},
        },
    ),
    "gemma4": ("Gemma4TextConfig", GEMMA_4),
    "gemma4_shared": (
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            **{"attention_k_eq_v": False, "hidden_size_per_layer_input": 32},
            **{"vocab_size_per_layer_input": 512, "num_hidden_layers": 6},
            **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
            "layer_types": [
                *("full_attention", "sliding_attention", "sliding_attention"),
                *("sliding_attention", "full_attention", "full_attention"),
            ],
        },
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2},
            "moe_intermediate_size": 32,
        },
    ),
    "helium": ("HeliumConfig", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "cwm": (
        "CwmConfig",
        {
            **{"head_dim": 32, "sliding_window": 9},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "jais2": ("Jais2Config", {}),
    "vaultgemma": (
        "VaultGemmaConfig",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
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
    "flex_olmo": (
        "FlexOlmoConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0, "norm_topk_prob": True},
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            **{"head_dim": 32, "sliding_window": 9, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "num_shared_experts": 2, "route_scale": 1.8},
            **{"num_dense_layers": 1, "global_attn_every_n_layers": 2, "mup_enabled": True},
        },
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
    "hunyuan_moe": ("HunYuanMoEV1Config", {"head_dim": 32, "num_experts": 6, "moe_topk": 2}),
}
TINY_FAMILIES |= {
    "phimoe": (
        "PhimoeConfig",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": True},
            **{"lm_head_bias": True, "pad_token_id": 0, "router_jitter_noise": 0.3},
        },
    ),
    "nanochat": ("NanoChatConfig", {"pad_token_id": 0, "final_logit_softcapping": 3.0}),
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
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4},
            **{"attention_multiplier": 0.1, "logits_scaling": 2.5, "head_dim": 32},
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
# no context of the tests is longer than what a query selects
INDEXER = {"index_topk": 128, "index_n_heads": 2, "index_head_dim": 32, "q_lora_rank": 96}
TINY_FAMILIES |= {
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
            **{**GROUPS, **INDEXER, "rope_parameters": YARN},
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {**LATENT, **INDEXER, "n_group": 1, "topk_group": 1, "pad_token_id": 0},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **{"head_dim": 16, "sliding_window": 9, "final_logit_softcapping": 3.0},
            **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512},
            **{"num_hidden_layers": 5, "num_kv_shared_layers": 2, "laurel_rank": 8},
            "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0],
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention"),
                *("full_attention", "sliding_attention"),
            ],
            "tie_word_embeddings": True,
        },
    ),
}
TINY_FAMILIES["kimi_linear"] = (
    "KimiLinearConfig",
    {
        **{"kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 40},
        **{"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_token": 3},
        **{"moe_intermediate_size": 32, "num_shared_experts": 2, "pad_token_id": 0},
        **{"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 1.8},
        **{"linear_num_heads": 3, "linear_head_dim": 32},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
)
TINY_FAMILIES["minimax"] = (
    "MiniMaxConfig",
    {
        **{"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "block_size": 16},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{"linear_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 0.8},
        **{"full_attn_alpha_factor": 1.2, "full_attn_beta_factor": 0.7},
        **{"mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.3},
    },
)
# rows of what other families have, too: a few tests run them
ROWS = ("gpt_bigcode", "arcee", "ernie4_5", "ernie4_5_moe", "glm", "hunyuan", "olmoe", "dots1")
ROWS += ("granite_moe_shared", "hunyuan_moe", "falcon_rw")
ROWS += ("helium",)
ROWS += ("cwm",)
ROWS += ("jais2",)
ROWS += ("vaultgemma",)
ROWS += ("solar_open",)
ROWS += ("exaone_moe",)
ROWS += ("flex_olmo",)
ROWS += ("afmoe",)
ROWS += ("minicpm3",)
ROWS += ("mistral4",)
TINY_FAMILIES |= {"apertus": ("ApertusConfig", {"pad_token_id": 0, "head_dim": 32})}
ROWS += ("apertus",)
ROWS += ("gemma4_moe", "gemma4_shared")
ROWS += ("phimoe", "nanochat", "mellum", "hy_v3", "hyperclovax", "youtu", "gemma3n")
ROWS += ("deepseek_v32", "glm_moe_dsa")
ROWS += ("granite_swa", "granite_moe_swa", "olmo", "laguna", "mimo_v2")
# families whose layers have states
STATES = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe"),
    *("granite_hybrid", "granite_hybrid_moe", "falcon_h1", "nemotron_h", "nemotron_h_moe"),
    *("bamba", "nemotron_h_latent", "kimi_linear", "minimax"),
)
# ranks are refused
WITHOUT_RANKS = (
    "kimi_linear",
    "minimax",
    "gemma4",
    "gemma4_moe",
    "gemma4_shared",
    "gemma3n",
    "laguna",
    "mimo_v2",
)
# four linears in one matrix
WITHOUT_ADAPTERS = ("afmoe", *STATES)
