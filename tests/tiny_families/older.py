"""Older families: layer norms, ungated feed-forwards, positions that are learned or ALiBi."""

# their own names of the sizes; a width of the feed-forward that is not 4 times the hidden size
GPT = {
    **{"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96},
}
FALCON = {"ffn_hidden_size": 96, "tie_word_embeddings": True}
FALCON_RW = {
    **{"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
    **{"num_key_value_heads": 4, "tie_word_embeddings": True},
}
NEOX = {"hidden_act": "gelu"}
FAMILIES = {
    "gpt2": ("GPT2Config", {**GPT, "tie_word_embeddings": True}),
    "gpt_bigcode": ("GPTBigCodeConfig", {**GPT, "tie_word_embeddings": True}),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", {**NEOX, "rotary_pct": 0.5, "initializer_range": 0.3}),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2},
    ),
    # sizes that no key of theirs states
    "bloom": ("BloomConfig", {"tie_word_embeddings": True}),
    "mpt": ("MptConfig", {"tie_word_embeddings": True, "max_seq_len": 256}),
    "falcon": ("FalconConfig", FALCON),
    "falcon_rw": ("FalconConfig", FALCON_RW),
    "phi": ("PhiConfig", {"intermediate_size": 128}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 9}),
    "nemotron": ("NemotronConfig", {}),
}
# also served by rows of other families: a few tests run them
ROWS = (
    "gpt_bigcode",
    "falcon_rw",
)
