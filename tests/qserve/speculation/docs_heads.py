"""Random heads of docs-5m that draft in one pass."""

from tests.qserve.speculation.head_steps import write_head

LAYERS = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 8192,
    "rope_theta": 10000.0,
}
BLOCK = {"target_layer_ids": [0, 2], "mask_token_id": 8191, "block_size": 8}
NORMS = tuple(f"layers.{n}.self_attn.{each}_norm.weight" for n in range(2) for each in "qk")
CONFIGS = {
    "dflash": {
        **LAYERS,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": BLOCK,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
    },
    "dspark": {**LAYERS, **BLOCK, "architectures": ["Qwen3DSparkModel"], "markov_rank": 32},
    "peagle": {
        **LAYERS,
        "draft_vocab_size": 8192,
        "ptd_token_id": 8191,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
}


def write_docs_head(folder, kind):
    """Write a random head of the kind for docs-5m; it shares the model's output matrix."""
    extra = ("mask_hidden",) if kind == "peagle" else NORMS
    write_head(folder, CONFIGS[kind], without=("lm_head.weight",), extra=extra)
    return folder
