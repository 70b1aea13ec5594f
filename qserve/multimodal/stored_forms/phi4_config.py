"""Rewrite the config.json of Phi-4-multimodal for transformers. Loads no torch.

Its image token is in vision_config. Microsoft's files (`phi4mm`) have no vision_config: their tower
has transformers' default sizes.
"""

from collections.abc import Mapping
from typing import Any

_TOKEN, _DEFAULT_TOKEN = "image_token_id", 200010  # transformers' default
_MICROSOFTS = "phi4mm"
# keys of Microsoft's files that transformers does not have
_OTHER_KEYS = ("audio_processor", "embd_layer", "img_processor", "speech_lora", "vision_lora")
# The audio part is built with the model and dropped: it is as small as possible.
SMALL_AUDIO = {
    "num_blocks": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "ext_pw_out_channel": 8,
    "depthwise_separable_out_channel": 8,
    "nemo_conv_channels": 8,
}


def as_phi4(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's values with transformers' keys, and the image token next to others."""
    vision = dict(values.get("vision_config") or {})
    found = dict(values)
    if values.get("model_type") == _MICROSOFTS:
        found = {key: value for key, value in values.items() if key not in _OTHER_KEYS}
        found["model_type"] = "phi4_multimodal"
        stated = (values.get("embd_layer") or {}).get("image_embd_layer") or {}
        vision = {"crop_size": stated.get("crop_size", 448), **vision}
    return {
        **found,
        "vision_config": vision,
        "audio_config": dict(SMALL_AUDIO),
        _TOKEN: vision.get(_TOKEN, _DEFAULT_TOKEN),
    }
