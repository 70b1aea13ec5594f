"""Rewrite the config.json of InternVLChatModel for transformers' InternVL. Loads no torch.

The code in the folders of InternVL 2 to 3.5 has other keys and defaults than transformers.
"""

from collections.abc import Mapping
from typing import Any

from formats.architecture.sizes import is_size
from formats.architecture.text_part import LLM_CONFIG, TEXT_CONFIG

# keys of vision_config in files -> in transformers
_VISION_KEYS = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
# defaults of the code in the models' folders: InternViT-6B
_VISION_DEFAULTS = {
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
    "image_size": 224,
    "patch_size": 14,
    "attention_bias": False,
    "use_qk_norm": True,
    "norm_type": "rms_norm",
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
}
_VISION_TYPES = ("intern_vit_6b", "internvl_vision")
_SHUFFLE = "v2"  # order of a tile's embeddings in transformers; v1 swaps its rows and columns
# keys of the text model's config that give the sizes of its embedding
_TEXT_KEYS = ("hidden_size", "vocab_size")
# defaults of the code in the models' folders
_DEFAULTS = {
    "use_thumbnail": False,
    "dynamic_image_size": False,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
}


def as_internvl(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json's values with the keys of transformers' InternVL.

    Return None if transformers' model computes something else for images. The text part is replaced
    by a Llama of the same width, because transformers does not have all of InternVL's text models.
    """
    stated, text = values["vision_config"], values.get(TEXT_CONFIG, values.get(LLM_CONFIG))
    vision = {**_VISION_DEFAULTS}
    vision |= {_VISION_KEYS.get(key, key): each for key, each in stated.items()}
    size = values.get("force_image_size") or vision["image_size"]
    is_known = (
        stated.get("model_type", _VISION_TYPES[0]) in _VISION_TYPES
        and values.get("ps_version", "v1") == _SHUFFLE
        and size == vision["image_size"]
        and isinstance(text, dict)
        and all(is_size(text.get(key)) for key in _TEXT_KEYS)
    )
    if not is_known:
        return None
    vision["model_type"] = "internvl_vision"
    return {
        "architectures": values["architectures"],
        "model_type": "internvl",
        "vision_config": {key: vision[key] for key in ("model_type", *_VISION_DEFAULTS)},
        TEXT_CONFIG: {"model_type": "llama", **{key: text[key] for key in _TEXT_KEYS}},
        "downsample_ratio": values.get("downsample_ratio", 0.5),
        "vision_feature_layer": values.get("select_layer", -1),
    }


def tile_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the image processor, which config.json states."""
    vision = values.get("vision_config")
    size = values.get("force_image_size")
    if not size and isinstance(vision, dict):
        size = vision.get("image_size", _VISION_DEFAULTS["image_size"])
    found = {key: values.get(key, default) for key, default in _DEFAULTS.items()}
    return {
        "size": {"height": size, "width": size},
        "min_patches": found["min_dynamic_patch"] if found["dynamic_image_size"] else 1,
        "max_patches": found["max_dynamic_patch"] if found["dynamic_image_size"] else 1,
        "use_thumbnail": found["use_thumbnail"],
    }
