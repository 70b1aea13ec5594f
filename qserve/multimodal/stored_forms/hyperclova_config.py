"""Rewrite the config.json of HyperCLOVA X SEED for transformers' class. Loads no torch."""

from collections.abc import Mapping
from typing import Any


def as_hyperclova(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's values with transformers' model types; published files say `vlm`."""
    vision = {**values["vision_config"], "model_type": "qwen2_5_vl_vision"}
    return {**values, "model_type": "hyperclovax_vision_v2", "vision_config": vision}
