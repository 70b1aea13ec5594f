"""Rewrite the config.json of Phi-4-multimodal, whose image token is in vision_config."""

from collections.abc import Mapping
from typing import Any

_TOKEN, _DEFAULT_TOKEN = "image_token_id", 200010  # transformers' default
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
    """Return config.json's values with the image token next to the other tokens."""
    token = values["vision_config"].get(_TOKEN, _DEFAULT_TOKEN)
    return {**values, _TOKEN: token, "audio_config": dict(SMALL_AUDIO)}
