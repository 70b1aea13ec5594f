"""Rewrite the config.json of ERNIE 4.5 VL as published for transformers. Loads no torch.

Baidu's files state the text model's keys, and those of the resampler, next to `vision_config`.
"""

from collections.abc import Mapping
from typing import Any

from formats.architecture.stored_form.mixtures import ernie_vl
from formats.architecture.text_part import TEXT_CONFIG

# keys of the text model that transformers has, too
_TEXT_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "use_bias", "moe_intermediate_size", "moe_k", "moe_num_shared_experts"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
_VISION_KEYS = (
    *("depth", "hidden_act", "num_heads", "in_channels", "patch_size"),
    *("spatial_merge_size", "rms_norm_eps"),
)
_TOKENS = tuple(f"{kind}_{end}_token_id" for kind in ("image", "video") for end in ("start", "end"))
_SECTIONS = (22, 22, 20)  # of the code in the model's folder


def as_ernie_vl(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's values with transformers' keys."""
    if TEXT_CONFIG in values:
        return dict(values)  # of transformers
    stated, scaling = values["vision_config"], values.get("rope_scaling") or {}
    width = stated.get("hidden_size", 1280)
    vision = {key: stated[key] for key in _VISION_KEYS if key in stated}
    text = {key: values[key] for key in _TEXT_KEYS if values.get(key) is not None}
    experts = ernie_vl(values)
    return {
        **{key: values[key] for key in _TOKENS if key in values},
        "architectures": values["architectures"],
        "model_type": "ernie4_5_vl_moe",
        "image_token_id": values.get("im_patch_id"),
        TEXT_CONFIG: {
            **text,
            "moe_num_experts": experts["moe_num_experts"],
            "mlp_layer_types": experts.get("mlp_layer_types"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": values.get("rope_theta", 500_000.0),
                "mrope_section": list(scaling.get("mrope_section") or _SECTIONS),
            },
        },
        "vision_config": {
            **vision,
            "hidden_size": width,
            "intermediate_size": round(width * stated.get("mlp_ratio", 4)),
            "spatial_merge_size": values.get("spatial_conv_size", 2),
            "temporal_merge_size": values.get("temporal_conv_size", 2),
        },
    }
