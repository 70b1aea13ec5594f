"""Families with attention and a gated feed-forward in each layer, mostly as in Llama."""

FAMILIES = {
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
    "granite_swa": (
        "GraniteSWAConfig",
        {
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "sliding_window": 9},
            **{"attention_multiplier": 0.1, "logits_scaling": 2.5, "mlp_bias": True},
            **{"layer_rope_theta": [0, 100.0, 10000.0], "tie_word_embeddings": True},
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32}),
    "olmo": ("OlmoConfig", {"pad_token_id": 0}),
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
    "glm": ("GlmConfig", {"head_dim": 32, "pad_token_id": 0}),
    "glm4": (
        "Glm4Config",
        {"head_dim": 32, "pad_token_id": 0, "partial_rotary_factor": 0.5},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "cohere2": (
        "Cohere2Config",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "arcee": ("ArceeConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32, "use_bias": True}),
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
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4},
            **{"attention_multiplier": 0.1, "logits_scaling": 2.5, "head_dim": 32},
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
    "nanochat": ("NanoChatConfig", {"pad_token_id": 0, "final_logit_softcapping": 3.0}),
    "apertus": ("ApertusConfig", {"pad_token_id": 0, "head_dim": 32}),
}
# also served by rows of other families: a few tests run them
ROWS = (
    "granite_swa",
    "olmo",
    "glm",
    "arcee",
    "ernie4_5",
    "hunyuan",
    "hyperclovax",
    "helium",
    "cwm",
    "jais2",
    "nanochat",
    "apertus",
)
