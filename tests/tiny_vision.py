"""Tiny random vision-language models with a tokenizer, an image processor and a chat template."""

import json
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCS_5M = ROOT / "examples" / "models" / "docs-5m"
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    # Larger than usual: the outputs of a random model then differ from token to token.
    "initializer_range": 0.2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
# Content is a text or a list of parts; an image is written as its placeholder, a video as Qwen's.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}PLACEHOLDER"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
PIXELS = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6]}
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
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}
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
# Images of 2 to 9 embeddings; larger ones become at most 6 tiles of 4 and an overview.
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
# family -> what is written
VISION_FAMILIES = {
    "idefics3": {
        **IDEFICS,
        "config": "Idefics3Config",
        "image_processor": "Idefics3ImageProcessor",
    },
    "smolvlm": {**IDEFICS, "config": "SmolVLMConfig", "image_processor": "SmolVLMImageProcessor"},
    "gemma3": GEMMA_3,
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": LLAVA_ONEVISION,
    "internvl": INTERNVL,
    "gemma4": GEMMA_4,
    "gemma4_shared": GEMMA_4_SHARED,
    "mistral3": MISTRAL_3,
    "lighton_ocr": LIGHT_ON_OCR,
    "lfm2_vl": LFM2_VL,
    "llama4": LLAMA_4,
    "cohere2_vision": COHERE_2_VISION,
    "aya_vision": AYA_VISION,
    "kimi_k25": KIMI_K25,
    "qwen2_vl": QWEN_2_VL,
    "qwen2_5_vl": QWEN_2_5_VL,
    "exaone4_5": EXAONE_4_5,
    "qwen3_vl": QWEN_3_VL,
    "qwen3_vl_moe": QWEN_3_VL_MOE,
    "glm4v": GLM_4V,
    "glm4v_moe": GLM_4V_MOE,
    "glm_ocr": GLM_OCR,
    "glm46v": {**GLM_4V, "config": "Glm46VConfig", "image_processor": "Glm46VImageProcessor"},
    "qwen3_5": QWEN_3_5,
    "qwen3_5_moe": QWEN_3_5_MOE,
}


def write_tiny_vision(folder: Path, family: str, num_words: int = 0) -> Path:
    """Write a tiny random vision-language model, in float32.

    `num_words`: size of a vocabulary of words; 0: docs-5m's vocabulary.
    """
    import transformers

    row = VISION_FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tiny_tokenizer(folder, row["tokens"], row["placeholder"], num_words)
    vocab_size = 64 * -(-(max(ids.values()) + 1) // 64)
    usual = {key: value for key, value in TEXT.items() if key not in row.get("without", ())}
    config = getattr(transformers, row["config"])(
        text_config={**usual, "model_type": row["text_type"], "vocab_size": vocab_size}
        | {key: ids.get(str(value), value) for key, value in row.get("text", {}).items()},
        vision_config=row["vision"],
        image_token_id=ids[row.get("image", row["placeholder"])],
        tie_word_embeddings=False,
        **{key: ids.get(str(value), value) for key, value in row["whole"].items()},
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter, 0.0, 0.2)  # it begins as zeros
        elif "norm" in name or "bias" in name:
            # The text norms of Gemma multiply by 1 + weight.
            is_one = "norm" in name and "bias" not in name and family != "gemma3"
            torch.nn.init.normal_(parameter, float(is_one), 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith(("std_bias", "std_scale")):
            torch.nn.init.normal_(buffer, float(name.endswith("scale")), 0.2)
    model.save_pretrained(folder)
    if "names" in row:
        rename_tensors(folder, row["names"])
    processor = {"image_processor_type": row["image_processor"], **row["processor"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if "video" in row:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(row["video"]))
    return folder


def rename_tensors(folder: Path, names: dict[str, str]) -> None:
    """Replace parts of the names of a folder's tensors."""
    from safetensors.torch import load_file, save_file

    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for before, after in names.items():
            name = name.replace(before, after)
        state[name] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def write_tiny_tokenizer(
    folder: Path, tokens: list[str], placeholder: str, num_words: int = 0
) -> dict[str, int]:
    """Write docs-5m's tokenizer, or one of words, with more special tokens. Returns their ids."""
    tokenizer = json.loads((DOCS_5M / "tokenizer.json").read_text())
    if num_words:
        added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
        words = {f"w{number}": number for number in range(len(added), num_words)}
        tokenizer["model"] = {"type": "WordLevel", "vocab": {**added, **words}, "unk_token": "w9"}
        tokenizer |= {"pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    first = 1 + max(each["id"] for each in tokenizer["added_tokens"])
    first = max(first, len(tokenizer["model"]["vocab"]))
    ids = {token: first + number for number, token in enumerate(tokens)}
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**like, "id": number, "content": token} for token, number in ids.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((DOCS_5M / "tokenizer_config.json").read_text())
    config["chat_template"] = CHAT_TEMPLATE.replace("PLACEHOLDER", placeholder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ids


def film(num_frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """Frames [num_frames, height, width, 3], each a picture of its own."""
    return np.stack([np.asarray(picture(width, height, 99 * seed + n)) for n in range(num_frames)])


def picture(width: int, height: int, seed: int = 0):
    """A PIL image of random coloured blocks."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)
