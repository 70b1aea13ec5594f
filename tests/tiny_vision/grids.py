"""Qwen-VL and models with its grids of patches."""

from tests.tiny_vision.parts import PIXELS, TOWER

# Images of 256 to 2048 pixels: 1 to 8 embeddings.
GRID = {
    "tokens": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "placeholder": "<|image_pad|>",
    "image_processor": "Qwen2VLImageProcessor",
    "processor": {
        **PIXELS,
        "size": {"shortest_edge": 256, "longest_edge": 2048},
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    "whole": {"video_token_id": "<|video_pad|>"},
    # Videos of 1024 to 6144 pixels, in all frames (Qwen3) or in each (Qwen2.5).
    "video": {
        "image_mean": [0.4, 0.5, 0.5],
        "image_std": [0.5, 0.6, 0.5],
        "size": {"shortest_edge": 1024, "longest_edge": 6144},
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
}
QWEN_TOWER = {
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "depth": 4,
    "num_heads": 2,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "initializer_range": 0.2,
}
AXES = {"rope_type": "default", "rope_theta": 10000.0}
QWEN_2_5_VL = {
    **GRID,
    "config": "Qwen2_5_VLConfig",
    "text_type": "qwen2_5_vl_text",
    "text": {"rope_parameters": {**AXES, "mrope_section": [2, 3, 3]}},
    "vision": {
        **QWEN_TOWER,
        "window_size": 32,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
    "video": {**GRID["video"], "size": {"shortest_edge": 256, "longest_edge": 1024}},
}
QWEN_2_VL = {
    **QWEN_2_5_VL,
    "config": "Qwen2VLConfig",
    "text_type": "qwen2_vl_text",
    "vision": {
        **{key: QWEN_TOWER[key] for key in QWEN_TOWER if "hidden" not in key},
        "embed_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 2,
    },
}
del QWEN_2_VL["vision"]["intermediate_size"]
# positions of one axis; fewer heads of keys than of queries in the tower
EXAONE_4_5 = {
    **QWEN_2_5_VL,
    "config": "Exaone4_5_Config",
    "text_type": "exaone4",
    "text": {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "vision": {
        **QWEN_TOWER,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1, 3],
    },
}
del EXAONE_4_5["video"]
# an embedding for each patch
VIDEO_LLAMA_3 = {
    "config": "VideoLlama3Config",
    "tokens": ["<|image_pad|>", "<|video_pad|>"],
    "placeholder": "<|image_pad|>",
    "text_type": "qwen2",
    "vision": {**TOWER, "patch_size": 8},
    "whole": {"video_token_id": "<|video_pad|>"},
    "image_processor": "VideoLlama3ImageProcessor",
    "processor": {
        **PIXELS,
        **{"patch_size": 8, "merge_size": 1, "size": {"shortest_edge": 128, "longest_edge": 1536}},
    },
}
GLM_4V = {
    **GRID,
    "config": "Glm4vConfig",
    "tokens": ["<|image|>", "<|video|>"],
    "placeholder": "<|image|>",
    "image_processor": "Glm4vImageProcessor",
    "text_type": "glm4v_text",
    "text": {"rope_parameters": {**AXES, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    "vision": {**QWEN_TOWER, "image_size": 32},
    "whole": {"video_token_id": "<|video|>"},
}
del GLM_4V["video"]
GLM_OCR = {
    **GLM_4V,
    "config": "GlmOcrConfig",
    "text_type": "glm_ocr_text",
}
GLM_4V_MOE = {
    **GLM_4V,
    "config": "Glm4vMoeConfig",
    "text_type": "glm4v_moe_text",
    "text": {
        **GLM_4V["text"],
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
}
QWEN_3_TOWER = {**QWEN_TOWER, "num_position_embeddings": 16}
AXES["mrope_interleaved"] = True
QWEN_3_VL = {
    **GRID,
    "config": "Qwen3VLConfig",
    "text_type": "qwen3_vl_text",
    "text": {"rope_parameters": {**AXES, "mrope_section": [4, 2, 2]}},
    "vision": {**QWEN_3_TOWER, "deepstack_visual_indexes": [0, 2]},
}
QWEN_3_VL_MOE = {
    **QWEN_3_VL,
    "config": "Qwen3VLMoeConfig",
    "text_type": "qwen3_vl_moe_text",
    "text": {
        **QWEN_3_VL["text"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    },
}
QWEN_3_5 = {
    **GRID,
    "config": "Qwen3_5Config",
    "text_type": "qwen3_5_text",
    "text": {
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {
            **AXES,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    },
    "vision": {**QWEN_3_TOWER, "deepstack_visual_indexes": []},
}
QWEN_3_5_MOE = {
    **QWEN_3_5,
    "config": "Qwen3_5MoeConfig",
    "text_type": "qwen3_5_moe_text",
    "text": {
        **QWEN_3_5["text"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "without": ("intermediate_size",),
}
# patches of one frame; all keys of the text model next to vision_config in published files
PADDLE_OCR_VL = {
    **GRID,
    "config": "PaddleOCRVLConfig",
    "image_processor": "PaddleOCRVLImageProcessor",
    "processor": {**GRID["processor"], "temporal_patch_size": 1},
    "text_type": "paddleocr_vl_text",
    "text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        }
    },
    "vision": {**TOWER, "image_size": 32, "patch_size": 8, "spatial_merge_size": 2},
}
del PADDLE_OCR_VL["video"]
# Images of 256 to 2048 pixels: 1 to 8 embeddings, one for each row, and two around them.
HUNYUAN_OCR = {
    **PADDLE_OCR_VL,
    "config": "HunYuanVLConfig",
    "image_processor": "HunYuanVLImageProcessor",
    "text_type": "hunyuan_vl_text",
    "text": {
        "rope_parameters": {
            **{"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 3.0},
            "mrope_section": [1, 2, 3, 2],
        },
    },
    "vision": {
        **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "patch_size": 8, "max_image_size": 64},
        **{"out_hidden_size": 64, "text_hidden_size": 64, "initializer_range": 0.2},
    },
}
# Experts for text and, with other sizes, for the tokens of images and around them.
ERNIE_VL = {
    "config": "Ernie4_5_VLMoeConfig",
    "tokens": ["<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"],
    "placeholder": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    "image": "<|IMAGE_PLACEHOLDER|>",
    "image_processor": "Ernie4_5_VLMoeImageProcessor",
    "processor": {**GRID["processor"], "temporal_patch_size": 1},
    "whole": {"image_start_token_id": "<|IMAGE_START|>", "image_end_token_id": "<|IMAGE_END|>"},
    "text_type": "ernie4_5_vl_moe_text",
    "text": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [64, 32]},
        "rope_parameters": {**AXES, "rope_theta": 100.0, "mrope_section": [3, 3, 2]},
    },
    "vision": {
        **{"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2},
        **{"patch_size": 8, "spatial_merge_size": 2, "initializer_range": 0.2},
    },
}
# Queries of the last two layers see two blocks of 16 keys.
MINIMAX_M3 = {
    "config": "MiniMaxM3VLConfig",
    "tokens": ["]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["],
    "placeholder": "]<]image[>[",
    "image_processor": "MiniMaxM3VLImageProcessor",
    "processor": GRID["processor"],
    "whole": {"video_token_id": "]<]video[>[", "projector_hidden_size": 40},
    "text_type": "minimax_m3_vl_text",
    "text": {
        **{"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32},
        **{"dense_intermediate_size": 96, "shared_intermediate_size": 64, "swiglu_limit": 0.5},
        **{"index_n_heads": 2, "index_head_dim": 32, "index_block_size": 16},
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
        },
    },
    # a third of a head's 28 channels is 9: each axis has four pairs, and four channels do not
    # rotate
    "vision": {
        **{"hidden_size": 56, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "patch_size": 8, "initializer_range": 0.2},
    },
}
# convolutions over patches and attention with fewer heads of keys; positions of one axis
LFM_3_VL = {
    **GRID,
    "config": "Lfm3VlConfig",
    "text_type": "lfm3",
    "text": {
        **{"sliding_window": 9, "layer_types": ["conv", "sliding_attention", "full_attention"]},
        "tie_word_embeddings": False,
    },
    "vision": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "patch_size": 8},
        **{"temporal_patch_size": 2, "spatial_merge_size": 2, "initializer_range": 0.2},
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "whole": {"video_token_id": "<|video_pad|>", "projector_hidden_size": 48},
    # names of the published files; transformers reads them
    "names": {
        "vision_tower.patch_embed.": "vision_tower.patchifier.",
        **{
            f"vision_tower.layers.{norm}_norm.": f"vision_tower.layers.{norm}_layernorm."
            for norm in (f"{i}.self_attn.{x}" for i in (1, 3) for x in "qk")
        },
    },
}
del LFM_3_VL["video"]
HYPERCLOVA = {
    **QWEN_2_5_VL,
    "config": "HyperCLOVAXVisionV2Config",
    "text_type": "hyperclovax",
    "text": {},
    "vision": {**QWEN_2_5_VL["vision"], "out_hidden_size": 40},
}
del HYPERCLOVA["video"]
FAMILIES = {
    "lfm3_vl": LFM_3_VL,
    "hyperclova": HYPERCLOVA,
    "ernie_vl": ERNIE_VL,
    "minimax_m3": MINIMAX_M3,
    "hunyuan_ocr": HUNYUAN_OCR,
    "paddleocr_vl": PADDLE_OCR_VL,
    "qwen2_vl": QWEN_2_VL,
    "qwen2_5_vl": QWEN_2_5_VL,
    "exaone4_5": EXAONE_4_5,
    "video_llama_3": VIDEO_LLAMA_3,
    "qwen3_vl": QWEN_3_VL,
    "cosmos3": {**QWEN_3_VL, "config": "Cosmos3OmniConfig"},
    "qwen3_vl_moe": QWEN_3_VL_MOE,
    "glm4v": GLM_4V,
    "glm4v_moe": GLM_4V_MOE,
    "glm_ocr": GLM_OCR,
    "glm46v": {**GLM_4V, "config": "Glm46VConfig", "image_processor": "Glm46VImageProcessor"},
    "glmga": {**GLM_4V, "config": "GlmgaConfig", "image_processor": "GlmgaImageProcessor"},
    "qwen3_5": QWEN_3_5,
    "qwen3_5_moe": QWEN_3_5_MOE,
}
