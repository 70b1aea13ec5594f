"""DeepSeek-OCR, whose tower reads SAM's output with another model."""

from tests.tiny_vision.parts import PIXELS

SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "window_size": 3,
    "global_attn_indexes": [1],
    "mlp_dim": 48,
    "downsample_channels": [24, 32],
    "initializer_range": 0.2,
}
EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "routed_scaling_factor": 1.5,
}
DETAILS = ("model_type", "mlp_layer_types", "layer_types", "sliding_window", "dtype")


def published(config):
    """config.json in the form of DeepSeek's files."""
    vision, text = config["vision_config"], config["text_config"]
    sam, encoder = vision["sam_config"], vision["encoder_config"]
    parts = {"sam_vit_b": {**sam, "width": sam["hidden_size"]}}
    parts["sam_vit_b"] |= {"heads": sam["num_attention_heads"], "layers": sam["num_hidden_layers"]}
    parts["sam_vit_b"]["mlp_ratio"] = sam["mlp_dim"] / sam["hidden_size"]
    is_second = config["model_type"] == "deepseek_ocr2"
    if is_second:
        parts["qwen2-0-5b"] = {**encoder, "dim": encoder["hidden_size"]}
    else:
        parts["clip-l-14-224"] = {
            "width": encoder["hidden_size"],
            "mlp_width": encoder["intermediate_size"],
            "layers": encoder["num_hidden_layers"],
            "heads": encoder["num_attention_heads"],
            "image_size": encoder["image_size"],
            "patch_size": encoder["patch_size"],
        }
    language = {key: value for key, value in text.items() if key not in DETAILS}
    language |= {"architectures": ["DeepseekV2ForCausalLM"], "use_mla": False}
    language |= {"first_k_dense_replace": 1, "kv_lora_rank": None, "v_head_dim": 0}
    return {
        "architectures": [f"DeepseekOCR{'2' if is_second else ''}ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": language,
        "projector_config": {"projector_type": "linear"},
        "vision_config": {"image_size": sam["image_size"], "width": parts},
        "dtype": "float32",
        **{key: value for key, value in language.items() if key != "architectures"},
    }


# At most 4 tiles of 16 pixels, 1 embedding each, and an overview of 4, with one for each row.
DEEPSEEK_OCR = {
    "config": "UnlimitedOcrConfig",
    "tokens": ["<image>"],
    "placeholder": "<image>",
    "text_type": "unlimited_ocr_text",
    # longer than the prompts: transformers has no class without it
    "text": {**EXPERTS, "sliding_window": 4096},
    "vision": {
        "sam_config": SAM,
        "encoder_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "initializer_range": 0.2,
        },
    },
    "whole": {},
    "published": published,
    "image_processor": "UnlimitedOcrImageProcessor",
    "processor": {
        **PIXELS,
        "size": {"height": 32, "width": 32},
        "tile_size": 16,
        "max_patches": 4,
    },
}
# An overview of 144 embeddings, and as many of each tile of 48 pixels; one after the image.
DEEPSEEK_OCR_2 = {
    **DEEPSEEK_OCR,
    "config": "DeepseekOcr2Config",
    "text_type": "deepseek_ocr2_text",
    "text": {**EXPERTS, "max_position_embeddings": 2048},
    "vision": {
        "sam_config": SAM,
        "encoder_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
            "vocab_size": 8,
        },
    },
    "image_processor": "DeepseekOcr2ImageProcessor",
    "processor": {**DEEPSEEK_OCR["processor"], "tile_size": 48, "max_patches": 2},
}
# Queries attend to the prompt and to three tokens of the output.
UNLIMITED_OCR = {
    **{key: value for key, value in DEEPSEEK_OCR.items() if key != "published"},
    "text": {**EXPERTS, "sliding_window": 3},
}
FAMILIES = {
    "deepseek_ocr": DEEPSEEK_OCR,
    "deepseek_ocr_2": DEEPSEEK_OCR_2,
    "unlimited_ocr": UNLIMITED_OCR,
}
