"""Tiny models of the architectures that GGUF files state, as llama.cpp reads them."""

# Gemma 3n's sizes that llama.cpp has in its code; a wide feed-forward, because its sparse
# activations take the unbiased deviation
GEMMA_3N = {
    **{"final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256, "laurel_rank": 64},
    **{"num_hidden_layers": 25, "num_kv_shared_layers": 5, "intermediate_size": [4096] * 25},
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 5,
}
GEMMA_4_SHARED = {
    "layer_types": [
        *("full_attention", "sliding_attention", "full_attention"),
        *("sliding_attention", "full_attention", "full_attention"),
    ]
}
LONG_ROPE = {
    **{"sliding_window": None, "max_position_embeddings": 64},
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 10000.0},
        **{"short_factor": [1.0] * 8, "original_max_position_embeddings": 32},
        "long_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0],
    },
}
SEVERAL = {"new_decoder_architecture": True, "num_kv_heads": 2}
# (family of tests/tiny_families.py, what differs, architecture), by a name
CASES = {
    "gpt2": ("gpt2", {}, "gpt2"),
    "falcon, two norms": ("falcon", SEVERAL, "falcon"),
    "apertus": ("apertus", {}, "apertus"),
    "gemma4": ("gemma4", {}, "gemma4"),
}
MORE_CASES = {
    "gpt_bigcode": ("gpt_bigcode", {}, "starcoder"),
    "gpt_bigcode, all heads": ("gpt_bigcode", {"multi_query": False}, "starcoder"),
    "gpt_neox": ("gpt_neox", {}, "gptneox"),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}, "gptneox"),
    "falcon": ("falcon", {}, "falcon"),
    "falcon, one norm": ("falcon", {**SEVERAL, "num_ln_in_parallel_attn": 1}, "falcon"),
    "falcon, all heads": ("falcon", {"multi_query": False, "num_key_value_heads": 4}, "falcon"),
    "bloom": ("bloom", {}, "bloom"),
    "mpt": ("mpt", {}, "mpt"),
    "stablelm": ("stablelm", {}, "stablelm"),
    "stablelm, tied": ("stablelm", {"tie_word_embeddings": True}, "stablelm"),
    "phi": ("phi", {}, "phi2"),
    "phi3": ("phi3", {"sliding_window": None}, "phi3"),
    "phi3, long": ("phi3", LONG_ROPE, "phi3"),
    "olmo": ("olmo", {}, "olmo"),
    "gemma": ("gemma", {}, "gemma"),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}, "gemma2"),
    "gemma3": (
        "gemma3",
        {
            **{"query_pre_attn_scalar": 16, "num_hidden_layers": 6},
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
        "gemma3",
    ),
    "gemma3n": ("gemma3n", GEMMA_3N, "gemma3n"),
    "gemma4, shared": ("gemma4_shared", GEMMA_4_SHARED, "gemma4"),
    "arcee": ("arcee", {}, "arcee"),
    "ernie4_5": ("ernie4_5", {"use_bias": False}, "ernie4_5"),
    "hunyuan": ("hunyuan", {}, "hunyuan-dense"),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}, "chatglm"),
    "ministral3": ("ministral3", {}, "mistral3"),
    "jais2": ("jais2", {}, "jais2"),
    "granite_swa": ("granite_swa", {"layer_rope_theta": [0, 100.0, 100.0]}, "granite-swa"),
    "llama": ("llama", {}, "llama"),
    "mistral": ("mistral", {"sliding_window": None}, "llama"),
    "helium": ("helium", {}, "llama"),
    "qwen2": ("qwen2", {"use_sliding_window": False}, "qwen2"),
    "qwen3": ("qwen3", {}, "qwen3"),
    "granite": ("granite", {}, "granite"),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4}, "smollm3"),
    "seed_oss": ("seed_oss", {}, "seed_oss"),
    "olmo2": ("olmo2", {}, "olmo2"),
    "olmo3": ("olmo3", {}, "olmo2"),
    "exaone4": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        "exaone4",
    ),
    "glm4": ("glm4", {}, "glm4"),
    "cohere": ("cohere", {}, "command-r"),
    "cohere2": ("cohere2", {"tie_word_embeddings": True}, "cohere2"),
    "starcoder2": ("starcoder2", {"sliding_window": None}, "starcoder2"),
    "nemotron": ("nemotron", {}, "nemotron"),
}
