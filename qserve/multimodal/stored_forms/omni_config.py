"""Rewrite the config.json of Qwen-Omni for the part with a vision tower. Loads no torch.

Its thinker contains the text model and the towers. The tower of Qwen3-Omni is that of Qwen3-VL
under other names. Sounds and speech are not used.
"""

from collections.abc import Mapping
from typing import Any

from formats.architecture.text_part import TEXT_CONFIG, THINKER_CONFIG

# architectures of Qwen2.5-Omni
OMNI_2_5 = (
    "Qwen2_5OmniModel",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
)
# audio_config of a small tower, which is built and removed
OMNI_AUDIO = {
    **{"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 16},
    **{"output_dim": 16, "num_mel_bins": 8},
}
_KEYS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def as_omni(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of Qwen2.5-Omni's thinker; None: it has no vision tower."""
    thinker = values.get(THINKER_CONFIG, values)
    if not (isinstance(thinker, Mapping) and isinstance(thinker.get("vision_config"), Mapping)):
        return None
    return {**thinker, "model_type": "qwen2_5_omni_thinker"}


def as_qwen3_vl_moe(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of Qwen3-Omni's thinker as Qwen3-VL's; None: it has no vision tower."""
    thinker = as_omni(values)
    if thinker is None:
        return None
    return {
        **{key: thinker[key] for key in _KEYS if key in thinker},
        "model_type": "qwen3_vl_moe",
        "vision_config": {**thinker["vision_config"], "model_type": "qwen3_vl_moe_vision"},
        TEXT_CONFIG: {**thinker[TEXT_CONFIG], "model_type": "qwen3_vl_moe_text"},
    }
