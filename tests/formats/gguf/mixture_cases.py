"""Tiny models of architectures with experts, latent attention or states, as llama.cpp has them."""

_ONE_GROUP = {"n_group": 1, "topk_group": 1}
# llama.cpp has these factors in its code, and no biases
MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "mlp_bias": False}
# llama.cpp adds no biases to q, k and v, and multiplies experts by no factor
MIMO = {"attention_bias": False, "routed_scaling_factor": 1.0}
# llama.cpp has one factor of the residual stream, and none of blocks
MINIMAX = {
    f"{block}_{letter}_factor": factor
    for block in ("full_attn", "linear_attn", "mlp")
    for letter, factor in (("alpha", 3.5), ("beta", 1.0))
}
# Queries select fewer keys than there are; of few heads, many scores would be 0
_SELECTING = {"index_topk": 24, "index_n_heads": 16, "index_head_dim": 64}
# GGUF states one number for both factors
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "mscale": 1.0},
    **{"original_max_position_embeddings": 8, "mscale_all_dim": 1.0},
}
# Step-3.5, whose kinds of layers both rotate in part; of layers without a window more
_STEP_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
}
_ONE_WIDTH = {"linear_value_head_dim": 16}  # of keys and values
# (family of tests/tiny_families.py, what differs, architecture)
USUAL = (
    ("granite_moe_shared", {}, "granitemoe"),
    ("qwen3_5", _ONE_WIDTH, "qwen35"),
    ("nemotron_h", {}, "nemotron_h"),
    ("minicpm3", MINICPM, "minicpm3"),
    ("gemma4_moe", {}, "gemma4"),
    ("step", {}, "step35"),
    ("jamba", {}, "jamba"),
)
# twice the hidden size, as llama.cpp has it
_CHANNELS = {"intermediate_size": 128}
OTHERS = (
    ("mamba", _CHANNELS, "mamba"),
    ("mamba2", {}, "mamba2"),
    ("falcon_mamba", {**_CHANNELS, "mixer_rms_eps": 1e-6}, "mamba"),
    ("jamba", {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2}, "jamba"),
    ("glm4_moe", _ONE_GROUP, "glm4moe"),
    ("solar_open", _ONE_GROUP, "glm4moe"),
    ("youtu", {}, "deepseek2"),
    ("mistral4", {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.6}}, "mistral4"),
    ("deepseek_v32", {**_SELECTING, "rope_parameters": _YARN}, "deepseek32"),
    (
        "glm_moe_dsa",
        {
            **_SELECTING,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full"],
        },
        "glm-dsa",
    ),
    ("mimo_v2", MIMO, "mimo2"),
    ("laguna", {"attention_bias": False}, "laguna"),
    (
        "laguna",
        {
            **{"attention_bias": False, "gating": "per-element"},
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
                    **{"original_max_position_embeddings": 16, "partial_rotary_factor": 0.5},
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "laguna",
    ),
    ("step", {"rope_parameters": _STEP_ROPES, "swiglu_limits": None}, "step35"),
    ("step", {"layer_types": ["sliding_attention"] * 4}, "step35"),
    ("olmoe", {"num_key_value_heads": 4}, "olmoe"),
    ("granite_moe", {}, "granitemoe"),
    ("hunyuan_moe", {}, "hunyuan-moe"),
    ("ernie4_5_moe", {}, "ernie4_5-moe"),
    ("minimax_m2", {}, "minimax-m2"),
    (
        "dots1",
        {
            **{"num_key_value_heads": 4, "layer_types": ["full_attention"] * 3},
            **{"sliding_window": None, **_ONE_GROUP},
        },
        "dots1",
    ),
    ("exaone_moe", {}, "exaone-moe"),
    ("lfm2", {}, "lfm2"),
    ("lfm2_moe", {"routed_scaling_factor": 1.0}, "lfm2moe"),
    ("qwen3_next", {**_ONE_WIDTH, "mlp_only_layers": []}, "qwen3next"),
    ("granite_hybrid", {}, "granitehybrid"),
    ("granite_hybrid_moe", {}, "granitehybrid"),
    ("bamba", {}, "granitehybrid"),
    ("bamba", {"attention_bias": True, "mlp_bias": True}, "granitehybrid"),
    ("qwen3_5_moe", _ONE_WIDTH, "qwen35moe"),
    ("nemotron_h_moe", {}, "nemotron_h_moe"),
    ("nemotron_h_latent", {}, "nemotron_h_moe"),
    ("falcon_h1", {}, "falcon-h1"),
    (
        "kimi_linear",
        {"linear_num_heads": 4, "num_expert_group": 1, "topk_group": 1},
        "kimi-linear",
    ),
    ("minimax", MINIMAX, "minimax-01"),
    ("hy_v3", {}, "hy_v3"),
    ("afmoe", {"global_attn_every_n_layers": 4, "num_hidden_layers": 4}, "afmoe"),
    (
        "mellum",
        {
            "mlp_layer_types": ["sparse"] * 3,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("full_attention", "sliding_attention")
            },
        },
        "mellum",
    ),
    # llama.cpp has these numbers in its code
    (
        "llama4",
        {
            **{"moe_layers": [1, 3], "interleave_moe_layer_step": 2, "num_hidden_layers": 4},
            **{"no_rope_layer_interval": 4, "attention_chunk_size": 8192},
            **{"floor_scale": 8192, "attn_scale": 0.1},
        },
        "llama4",
    ),
)
# Checkpoints have all experts in one tensor; llama.cpp rounds the bounds of YaRN, which the model
# does not
GPT_OSS = (
    "gpt_oss",
    {
        **{"swiglu_limit": 7.0, "num_hidden_layers": 2},
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt-oss",
)
# transformers does not read that a part of a head rotates
MINIMAX_PART = ("minimax", {**MINIMAX, "rotary_dim": 16}, "minimax-01")
# llama.cpp routes Phi-3.5-MoE by softmax instead of sparsemixer
ONLY_HERE = (
    ("phimoe", {"router_jitter_noise": 0.01}, "phimoe"),
    # the newest llama.cpp has it alone
    ("granite_moe_swa", {"layer_rope_theta": [100.0, 0, 100.0]}, "granite-swa"),
)
