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
FAMILIES = {"llava": LLAVA, "llava_next": LLAVA_NEXT, "llava_onevision": LLAVA_ONEVISION}
