"""Rewrite the config.json of DeepSeek-OCR and DeepSeek-OCR-2 for transformers. Loads no torch.

transformers has no class for DeepSeek-OCR, but one for Unlimited-OCR, whose tower is the same.
Published files state only some sizes of the towers. The others are those of their code.
"""

from collections.abc import Mapping
from typing import Any

from formats.architecture.text_part import LANGUAGE_CONFIG, TEXT_CONFIG

# from the code in the model's folder: values of SAM, and of the model that reads SAM's output
_SAM = {"mlp_ratio": 4, "output_channels": 256, "window_size": 14}
_QWEN_2 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "vocab_size": 1,
}
_IMAGE_TOKEN = 128815  # the tokenizer's `<image>`
# keys of text configs that transformers does not have, with values that its class would reject
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_WHOLE = 2**20  # a window that is longer than any context


def as_deepseek_ocr(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json's values as Unlimited-OCR's; None for another tower."""
    parts = _parts(values)
    if parts is None or not isinstance(parts.get("clip-l-14-224"), Mapping):
        return None
    clip = parts["clip-l-14-224"]
    width = clip.get("width", 1024)
    encoder = {
        "hidden_size": width,
        "intermediate_size": clip.get("mlp_width", 4 * width),
        "num_hidden_layers": clip.get("layers", 24),
        "num_attention_heads": clip.get("heads", 16),
        "image_size": clip.get("image_size", 224),
        "patch_size": clip.get("patch_size", 14),
    }
    sam = _sam(values, parts["sam_vit_b"], [512, 1024])
    return _whole(values, "unlimited_ocr", sam, encoder, {"sliding_window": _WHOLE})


def as_unlimited_ocr(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json's values with transformers' keys; None for another tower."""
    return dict(values) if TEXT_CONFIG in values else as_deepseek_ocr(values)


def as_deepseek_ocr_2(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json's values with transformers' keys; None for another tower."""
    if TEXT_CONFIG in values:
        return dict(values)  # of transformers
    parts = _parts(values)
    if parts is None or not isinstance(parts.get("qwen2-0-5b"), Mapping):
        return None
    stated = parts["qwen2-0-5b"]
    encoder = {**_QWEN_2, "hidden_size": stated.get("dim", _QWEN_2["hidden_size"])}
    encoder |= {key: stated[key] for key in _QWEN_2 if key in stated}
    sam = _sam(values, parts["sam_vit_b"], [512, 896])
    return _whole(values, "deepseek_ocr2", sam, encoder, {})


def _parts(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the sizes of both parts of the tower; None if config.json does not state them."""
    parts = values["vision_config"].get("width")
    is_known = isinstance(parts, Mapping) and isinstance(parts.get("sam_vit_b"), Mapping)
    return parts if is_known and isinstance(values.get(LANGUAGE_CONFIG), Mapping) else None


def _sam(
    values: Mapping[str, Any], stated: Mapping[str, Any], channels: list[int]
) -> dict[str, Any]:
    width = stated.get("width", 768)
    sizes = {key: stated.get(key, default) for key, default in _SAM.items()}
    return {
        "hidden_size": width,
        "num_hidden_layers": stated.get("layers", 12),
        "num_attention_heads": stated.get("heads", 12),
        "global_attn_indexes": stated.get("global_attn_indexes", [2, 5, 8, 11]),
        "downsample_channels": stated.get("downsample_channels") or channels,
        "image_size": values["vision_config"].get("image_size", 1024),
        "patch_size": stated.get("patch_size", 16),
        "mlp_dim": round(width * sizes["mlp_ratio"]),
        "output_channels": sizes["output_channels"],
        "window_size": sizes["window_size"],
    }


def _whole(
    values: Mapping[str, Any],
    model_type: str,
    sam: dict[str, Any],
    encoder: dict[str, Any],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    stated = values[LANGUAGE_CONFIG]
    text = {key: value for key, value in stated.items() if key not in (*_LATENT, "auto_map")}
    count, dense = text.get("num_hidden_layers", 0), text.get("first_k_dense_replace", 0)
    return {
        "architectures": values["architectures"],
        "model_type": model_type,
        "image_token_id": _IMAGE_TOKEN,
        "vision_config": {"sam_config": sam, "encoder_config": encoder},
        TEXT_CONFIG: {
            **text,
            **more,
            "model_type": f"{model_type}_text",
            "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(count)],
        },
    }
