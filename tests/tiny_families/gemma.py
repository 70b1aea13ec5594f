"""Gemma and its relatives."""

GEMMA = {
    "head_dim": 16,
    "sliding_window": 9,
    # not head_dim, so that the one is not taken for the other
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
GEMMA_4 = {
    **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
    **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 9},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    **{"tie_word_embeddings": True, "final_logit_softcapping": 3.0},
}
FAMILIES = {
    "gemma": ("GemmaConfig", {"head_dim": 16, "tie_word_embeddings": True}),
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
    "vaultgemma": (
        "VaultGemmaConfig",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        },
    ),
}
# also served by rows of other families: a few tests run them
ROWS = (
    "gemma3n",
    "gemma4_shared",
    "gemma4_moe",
    "vaultgemma",
)
