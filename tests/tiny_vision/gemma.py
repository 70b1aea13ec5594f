"""Gemma and its relatives, whose image rows see each other."""

from tests.tiny_vision.parts import PIXELS, SIGLIP, TOWER

GEMMA_3 = {
    "config": "Gemma3Config",
    "tokens": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "placeholder": "<start_of_image>",
    "image": "<image_soft_token>",
    "text_type": "gemma3_text",
    "text": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "vision": SIGLIP,
    "whole": {
        "mm_tokens_per_image": 4,
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    "image_processor": "Gemma3ImageProcessor",
    "processor": {**PIXELS, "size": {"height": 32, "width": 32}},
}
# About 70 embeddings, whatever the image's size is: each of 2 x 2 patches.
GEMMA_4 = {
    "config": "Gemma4Config",
    "tokens": ["<|image>", "<|image|>", "<image|>", "<|video|>", "<|pad|>"],
    "placeholder": "<|image|>",
    "text_type": "gemma4_text",
    "text": {
        "num_hidden_layers": 4,
        "sliding_window": 40,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
    "vision": {
        **TOWER,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "patch_size": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 256,
        "standardize": True,
        "use_clipped_linears": True,
    },
    "whole": {
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "video_token_id": "<|video|>",
        "audio_config": None,
    },
    "image_processor": "Gemma4ImageProcessor",
    "processor": {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70},
}
# E2B: inputs of each layer, and a layer that reads the keys of another
GEMMA_4_SHARED = {
    **GEMMA_4,
    "text": {
        **GEMMA_4["text"],
        "hidden_size_per_layer_input": 32,  # whole vectors of a CPU
        "num_kv_shared_layers": 2,
        "use_bidirectional_attention": None,
        "pad_token_id": "<|pad|>",
    },
}
# 12B: no tower; each patch of 16 x 16 pixels has an embedding
GEMMA_4_UNIFIED = {
    **GEMMA_4,
    "config": "Gemma4UnifiedConfig",
    "text_type": "gemma4_unified_text",
    "text": {
        "sliding_window": 75,  # an image is shorter
        **{
            key: GEMMA_4["text"][key]
            for key in (
                *("num_hidden_layers", "global_head_dim", "layer_types"),
                "use_bidirectional_attention",
            )
        },
    },
    "vision": {
        **{"patch_size": 8, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 70},
        **{"output_proj_dims": 32, "initializer_range": 0.2},
    },
    "image_processor": "Gemma4UnifiedImageProcessor",
}
# 16 embeddings for each image; the whole prompt sees itself
PALI_GEMMA = {
    "config": "PaliGemmaConfig",
    "tokens": ["<image>"],
    "placeholder": "<image>",
    "text_type": "gemma",
    "vision": {**SIGLIP, "vision_use_head": False},
    "whole": {"projection_dim": 64, "hidden_size": 64},
    "image_processor": "SiglipImageProcessor",
    "processor": {**PIXELS, "size": {"height": 32, "width": 32}, "image_seq_length": 16},
}
# windows shorter than the prompts
PALI_GEMMA_2 = {
    **PALI_GEMMA,
    "text_type": "gemma2",
    "text": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        # scores and logits of a tiny model are small: with the usual caps nothing bends
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
}
FAMILIES = {
    "gemma3": GEMMA_3,
    "gemma4": GEMMA_4,
    "gemma4_shared": GEMMA_4_SHARED,
    "gemma4_unified": GEMMA_4_UNIFIED,
    "paligemma": PALI_GEMMA,
    "paligemma2": PALI_GEMMA_2,
}
# text norms that multiply by 1 + weight
FROM_ZERO = ("gemma3", "paligemma", "paligemma2", "minimax_m3")
