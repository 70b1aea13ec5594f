"""Rewrite the config.json of Intern-S2-Preview for transformers' Qwen3.5-MoE. Loads no torch.

transformers has no class for it. Its text model and its vision tower are those of Qwen3.5-MoE; its
encoder of time series is not used.
"""

from collections.abc import Mapping
from typing import Any

_FAMILY = "qwen3_5_moe"


def as_qwen3_5_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's values with the model types of transformers' Qwen3.5-MoE."""
    found = {**values, "model_type": _FAMILY}
    for key, own in (("vision_config", _FAMILY), ("text_config", f"{_FAMILY}_text")):
        found[key] = {**values[key], "model_type": own}
    return found
