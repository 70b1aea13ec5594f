"""Models that cut an image into tiles."""

from tests.tiny_families import TINY_FAMILIES
from tests.tiny_vision.parts import PIXELS, SIGLIP, TOWER

LFM2_TILES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)]
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
IDEFICS_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", *TILES]
# At most 2 x 2 tiles of 32 pixels and the whole image: 4 embeddings each.
IDEFICS = {
    "tokens": IDEFICS_TOKENS,
    "placeholder": "<image>",
    "text_type": "llama",
    "vision": {**TOWER, "image_size": 32, "patch_size": 8},
    "whole": {"scale_factor": 2},
    "processor": {
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "image_mean": [0.5, 0.4, 0.5],
        "image_std": [0.5, 0.5, 0.6],
    },
}
# At most 4 tiles of 32 pixels and the whole image: 4 embeddings each.
INTERNVL = {
    "config": "InternVLConfig",
    "tokens": ["<img>", "<IMG_CONTEXT>", "</img>"],
    "placeholder": "<IMG_CONTEXT>",
    "text_type": "qwen3",
    "vision": {**TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
    "whole": {"image_seq_length": 4},
    "image_processor": "GotOcr2ImageProcessor",
    "processor": {**PIXELS, "size": {"height": 32, "width": 32}, "max_patches": 4},
}
# Images of 2 to 9 embeddings; larger ones become at most 6 tiles of 4 and an overview.
QIANFAN_OCR = {
    **INTERNVL,
    "config": "QianfanOCRConfig",
    # transformers 5.23 saves the text model's names with the level that only the tower has
    "names": {"language_model.model.encoder.": "language_model.model."},
}
LFM2_VL = {
    "config": "Lfm2VlConfig",
    "tokens": [
        *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        *LFM2_TILES,
    ],
    "placeholder": "<image>",
    "text_type": "lfm2",
    "text": {
        "layer_types": ["full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "without": ("head_dim",),
    "vision": {
        **TOWER,
        "model_type": "siglip2_vision_model",
        "patch_size": 8,
        "num_patches": 16,
        "vision_use_head": False,
    },
    "whole": {"projector_hidden_size": 48},
    "image_processor": "Lfm2VlImageProcessor",
    "processor": {
        **PIXELS,
        "encoder_patch_size": 8,
        "tile_size": 32,
        "max_tiles": 6,
        "min_image_tokens": 2,
        "max_image_tokens": 9,
    },
}
# At most 5 tiles of 32 pixels and the whole image: 4 embeddings each.
LLAMA_4 = {
    "config": "Llama4Config",
    "tokens": [
        *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"),
        *("<|tile_x_separator|>", "<|tile_y_separator|>"),
    ],
    "placeholder": "<|image|>",
    "image": "<|patch|>",
    "text_type": "llama4_text",
    "text": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 64,
    },
    "vision": {
        **TOWER,
        "image_size": 32,
        "patch_size": 8,
        "vision_output_dim": 40,
        "projector_input_dim": 40,
        "projector_output_dim": 40,
        "intermediate_size": 128,
    },
    "whole": {},
    "image_processor": "Llama4ImageProcessor",
    "processor": {**PIXELS, "size": {"height": 32, "width": 32}, "max_patches": 5},
}
# At most 4 tiles of 32 pixels and the whole image: 4 embeddings each.
COHERE_2_VISION = {
    "config": "Cohere2VisionConfig",
    "tokens": ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"],
    "placeholder": "<|IMG_PATCH|>",
    "text_type": "cohere2",
    "text": {
        # transformers leaves this factor of the logits out here; the text model alone has it
        "logit_scale": 1.0,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "vision": {**SIGLIP, "vision_use_head": False},
    "whole": {"alignment_intermediate_size": 96},
    "image_processor": "Cohere2VisionImageProcessor",
    "processor": {**PIXELS, "size": {"height": 32, "width": 32}, "max_patches": 4},
}
# At most 4 tiles of 32 pixels and the whole image: 4 embeddings each.
AYA_VISION = {
    **COHERE_2_VISION,
    "config": "AyaVisionConfig",
    "tokens": [
        *("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL"),
        *(f"TILE_{number}" for number in range(1, 5)),
    ],
    "placeholder": "<image>",
    "image": "<|IMG_PATCH|>",
    "image_processor": "GotOcr2ImageProcessor",
}
# Four quarters and the whole image, of any size up to 40 x 40 pixels: 3 embeddings each.
IDEFICS_2 = {
    "config": "Idefics2Config",
    "tokens": ["<fake_token_around_image>", "<image>", "<end_of_utterance>"],
    "placeholder": "<image>",
    "text_type": "mistral",
    "vision": {**TOWER, "image_size": 40, "patch_size": 8},
    "whole": {
        "perceiver_config": {
            "hidden_size": 64,
            "resampler_n_latents": 3,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
        }
    },
    "image_processor": "Idefics2ImageProcessor",
    "processor": {
        **PIXELS,
        "size": {"shortest_edge": 17, "longest_edge": 40},
        "do_image_splitting": True,
    },
}
# At most 4 slices and the whole image: 1 to 8 embeddings each, of 16 x 16 pixels.
MINICPM_V = {
    "config": "MiniCPMV4_6Config",
    "tokens": [
        *("<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>"),
        *("<image_id>", "</image_id>", "<|video_pad|>"),
    ],
    "placeholder": "<|image_pad|>",
    "text_type": "qwen3_5_text",
    "text": {
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "vision": {**TOWER, "num_hidden_layers": 3, "image_size": 32, "patch_size": 4},
    "whole": {"insert_layer_id": 1, "video_token_id": "<|video_pad|>"},
    "image_processor": "MiniCPMV4_6ImageProcessor",
    "processor": {**PIXELS, "scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4},
}
# Four times as many embeddings; transformers' image processor needs torchvision.
MINICPM_OCR = {
    **MINICPM_V,
    "config": "MiniCPMOcrConfig",
    "image_processor": "MiniCPMOcrImageProcessor",
}
# Tiles of 32 pixels, 4 embeddings each, and the whole image in 48 x 48 pixels, 9 embeddings.
STEP_3P7 = {
    "config": "Step3p7Config",
    "tokens": [
        *("<im_patch>", "<im_start>", "<im_end>"),
        *("<patch_start>", "<patch_end>", "<patch_newline>"),
    ],
    "placeholder": "<im_patch>",
    "text_type": "step3p5",
    "text": {**TINY_FAMILIES["step"][1], "head_dim": 16},
    "vision": {
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"mlp_ratio": 1.5, "image_size": 48, "patch_size": 4, "initializer_range": 0.2},
        **{"max_position_embeddings": 144, "layer_scale_init_value": 1.0},
    },
    "image_processor": "Step3p7ImageProcessor",
    "whole": {},
    "processor": {
        **PIXELS,
        **{"size": {"height": 48, "width": 48}, "patch_size": 32, "max_image_size": 96},
    },
}
FAMILIES = {
    "step3p7": STEP_3P7,
    "idefics2": IDEFICS_2,
    "idefics3": {
        **IDEFICS,
        "config": "Idefics3Config",
        "image_processor": "Idefics3ImageProcessor",
    },
    "smolvlm": {**IDEFICS, "config": "SmolVLMConfig", "image_processor": "SmolVLMImageProcessor"},
    "internvl": INTERNVL,
    "qianfan_ocr": QIANFAN_OCR,
    "lfm2_vl": LFM2_VL,
    "llama4": LLAMA_4,
    "cohere2_vision": COHERE_2_VISION,
    "minicpm_v": MINICPM_V,
    "minicpm_ocr": MINICPM_OCR,
    "aya_vision": AYA_VISION,
}
