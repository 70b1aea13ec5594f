"""Rewrite the config.json of Kimi-VL and Kimi-K2.5 for transformers' Kimi-K2.5. Loads no torch.

transformers has no class for Kimi-VL, whose vision part computes what Kimi-K2.5's does for a single
frame. Moonshot's files of Kimi-K2.5 have other keys than transformers.
"""

from collections.abc import Mapping
from typing import Any

from formats.quant_config import BLOCK

# keys of vision_config in Moonshot's files -> in transformers
_VISION_KEYS = {
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
}
_TOKEN = "media_placeholder_token_id"


def as_kimi_k25(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's values with the keys of transformers' Kimi-K2.5."""
    vision = {_VISION_KEYS.get(key, key): each for key, each in values["vision_config"].items()}
    vision["model_type"] = "kimi_k25_vision"
    text = {key: each for key, each in values["text_config"].items() if key != BLOCK}
    found = {**values, "model_type": "kimi_k25", "vision_config": vision, "text_config": text}
    if _TOKEN in found:
        found.setdefault("image_token_id", found[_TOKEN])
    if "hidden_size" in vision:
        found.setdefault("projection_hidden_size", vision["hidden_size"])
    if "projector_ln_eps" in vision:
        found.setdefault("projection_layer_norm_eps", vision["projector_ln_eps"])
    return found
