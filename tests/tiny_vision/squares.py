"""LLaVA and its relatives."""

from tests.tiny_vision.parts import PIXELS, SIGLIP, TOWER

LLAVA = {
    "config": "LlavaConfig",
    "tokens": ["<image>"],
    "placeholder": "<image>",
    "text_type": "llama",
    "vision": {
        **TOWER,
        "model_type": "clip_vision_model",
        "num_hidden_layers": 3,
        "image_size": 32,
        "patch_size": 8,
    },
    "whole": {},
    "image_processor": "CLIPImageProcessor",
    "processor": {
        **PIXELS,
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    },
}
RESOLUTIONS = [[32, 64], [64, 32], [64, 64], [96, 32]]
# At most 5 squares of 32 pixels: the rows of 16 embeddings each, and those of newlines.
LLAVA_NEXT = {
    **LLAVA,
    "config": "LlavaNextConfig",
    "text_type": "mistral",
    "whole": {"image_grid_pinpoints": RESOLUTIONS},
    "image_processor": "LlavaNextImageProcessor",
    "processor": {**LLAVA["processor"], "image_grid_pinpoints": RESOLUTIONS},
}
LLAVA_ONEVISION = {
    "config": "LlavaOnevisionConfig",
    "tokens": ["<image>", "<video>"],
    "placeholder": "<image>",
    "text_type": "qwen2",
    "vision": {**SIGLIP, "vision_use_head": False},
    # the embeddings of 3 tiles at most: of 4 they are scaled
    "whole": {
        "image_grid_pinpoints": RESOLUTIONS,
        "vision_aspect_ratio": "anyres_max_3",
        "video_token_id": "<video>",
    },
    "image_processor": "LlavaOnevisionImageProcessor",
    "processor": {
        **PIXELS,
        "size": {"height": 32, "width": 32},
        "image_grid_pinpoints": RESOLUTIONS,
    },
}
# the outputs of several layers of the tower
VIP_LLAVA = {
    **LLAVA,
    "config": "VipLlavaConfig",
    "vision": {**LLAVA["vision"], "num_hidden_layers": 4},
    "whole": {"vision_feature_layers": [-2, -3, 1]},
}
# One square of 32 pixels, filled with gray at two of its sides: 16 embeddings.
DEEPSEEK_VL = {
    "config": "DeepseekVLConfig",
    "tokens": ["<image_placeholder>"],
    "placeholder": "<image_placeholder>",
    "text_type": "llama",
    "vision": {**SIGLIP, "vision_use_head": False},
    "whole": {},
    "image_processor": "DeepseekVLImageProcessor",
    "processor": {**PIXELS, "size": {"height": 32, "width": 32}, "min_size": 5},
}
# The same square between two tokens; the generator of images is not used.
JANUS = {
    **DEEPSEEK_VL,
    "config": "JanusConfig",
    "tokens": ["<image_placeholder>", "<begin_of_image>", "<end_of_image>"],
    "vision": {
        **{key: value for key, value in TOWER.items() if key != "intermediate_size"},
        **{"mlp_ratio": 1.5, "image_size": 32, "patch_size": 8, "projection_dim": 64},
        "num_image_tokens": 16,
    },
    "whole": {
        "vq_config": {
            **{"num_embeddings": 16, "latent_channels": 32, "base_channels": 32},
            **{"channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": 64},
            "image_token_embed_dim": 64,
        }
    },
    "image_processor": "JanusImageProcessor",
}
# One square of 32 pixels: 64 patches, and an embedding for 16 of them.
GOT_OCR = {
    "config": "GotOcr2Config",
    "tokens": ["<imgpad>", "<img>", "</img>"],
    "placeholder": "<img><imgpad></img>",
    "image": "<imgpad>",
    "text_type": "qwen2",
    "vision": {
        **{"hidden_size": 32, "output_channels": 32, "mlp_dim": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "image_size": 32, "patch_size": 4, "window_size": 3},
        **{"global_attn_indexes": [1], "initializer_range": 0.2},
    },
    "whole": {},
    "image_processor": "GotOcr2ImageProcessor",
    "processor": {**PIXELS, "size": {"height": 32, "width": 32}},
}
FAMILIES = {
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": LLAVA_ONEVISION,
    "vip_llava": VIP_LLAVA,
    "deepseek_vl": DEEPSEEK_VL,
    "janus": JANUS,
    "got_ocr": GOT_OCR,
}
