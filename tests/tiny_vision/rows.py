"""Models with images of any size and rotary positions in the tower, other than Qwen's."""

from tests.tiny_families import TINY_FAMILIES
from tests.tiny_vision.parts import PIXELS, TOWER

# Sides of at most 64 pixels, rounded up to multiples of 16: 4 x 4 embeddings.
MISTRAL_3 = {
    "config": "Mistral3Config",
    "tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "placeholder": "[IMG]",
    "text_type": "mistral",
    "vision": {**TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 64, "patch_size": 8},
    "whole": {"spatial_merge_size": 2},
    "image_processor": "PixtralImageProcessor",
    "processor": {**PIXELS, "size": {"longest_edge": 64}, "patch_size": 8},
}
# Sides of at most 96 pixels, rounded up to multiples of 8; 16 x 16 pixels have an embedding.
LIGHT_ON_OCR = {
    **MISTRAL_3,
    "config": "LightOnOcrConfig",
    "tokens": ["<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"],
    "placeholder": "<|image_pad|>",
    "text_type": "qwen3",
    "vision": {**MISTRAL_3["vision"], "image_size": 96},
    "processor": {**PIXELS, "size": {"longest_edge": 96}, "patch_size": 8},
}
# At most 24 patches, 4 for each embedding.
KIMI_K25 = {
    "config": "Kimi_K25Config",
    "tokens": ["<|media_pad|>", "<|video_pad|>"],
    "placeholder": "<|media_pad|>",
    "text_type": "deepseek_v3",
    "text": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "without": ("head_dim",),
    "vision": {**TOWER, "patch_size": 8, "pos_emb_height": 4, "pos_emb_width": 4},
    "whole": {"projection_hidden_size": 32, "video_token_id": "<|video_pad|>"},
    "image_processor": "Kimi_K25ImageProcessor",
    "processor": {
        **PIXELS,
        "patch_size": 8,
        "max_patches": 24,
        "size": {"max_height": 7, "max_width": 7},
    },
    # names of the published files; transformers reads them but writes others
    "names": {
        "model.blocks.": "model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        "model.mm_projector.": "mm_projector.",
    },
}
# At most 12 embeddings, of 2 x 2 patches each.
MUSE_GLIMMER = {
    "config": "MuseGlimmerConfig",
    "tokens": ["<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>"],
    "placeholder": "<|patch|>",
    "text_type": "muse_glimmer_text",
    "text": {
        **{"num_hidden_layers": 4, "sliding_window": 9, "qk_scale_factor": 2.5},
        **{"output_multiplier": 0.6, "post_norm_eps": 0.3, "final_logit_softcapping": 5.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "vision": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5},
        **{"num_attention_heads": 2, "patch_size": 8, "initializer_range": 0.2},
        **{"pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16},
    },
    "whole": {
        **{"video_token_id": "<|video|>", "out_hidden_size": 128, "projector_hidden_size": 48},
    },
    "image_processor": "MuseGlimmerImageProcessor",
    "processor": {**PIXELS, "patch_size": 8, "max_image_tokens": 12},
}
# 4 to 12 patches, 4 for each embedding.
NEMOTRON_OMNI = {
    "config": "NemotronH_Omni_Reasoning_V3_Config",
    "tokens": ["<image>", "<img>", "</img>"],
    "placeholder": "<image>",
    "text_type": "nemotron_h",
    "text": TINY_FAMILIES["nemotron_h"][1],
    "without": ("head_dim", "num_hidden_layers"),
    "vision": {
        **{"model_type": "radio", "hidden_size": 32, "num_hidden_layers": 2, "patch_size": 8},
        **{"num_attention_heads": 2, "max_img_size": 48, "num_cls_tokens": 2, "num_registers": 3},
        **{"video_temporal_patch_size": 2, "initializer_range": 0.2},
    },
    "whole": {"vision_hidden_size": 32, "projector_hidden_size": 48},
    "image_processor": "NemotronH_Omni_Reasoning_V3ImageProcessor",
    "processor": {
        **{"norm_mean": PIXELS["image_mean"], "norm_std": PIXELS["image_std"]},
        **{"patch_size": 8, "min_num_patches": 8, "max_num_patches": 40},
    },
}
FAMILIES = {
    "nemotron_omni": NEMOTRON_OMNI,
    "muse_glimmer": MUSE_GLIMMER,
    "mistral3": MISTRAL_3,
    "lighton_ocr": LIGHT_ON_OCR,
    "kimi_k25": KIMI_K25,
}
