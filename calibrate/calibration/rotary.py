"""Rotary embeddings of transformers for calibration, built from changed configs."""

import copy
from typing import Any

from torch import nn

from formats.architecture.family import Family


def with_axes(config: Any) -> Any:
    """Return the config of ERNIE's rotary embedding, with some number of pairs for each axis.

    The axes of text are equal, so that any numbers give the same embedding.
    """
    found = copy.deepcopy(config)
    pairs = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ) // 2
    sections = [pairs // 3, pairs // 3, pairs - 2 * (pairs // 3)]
    found.rope_parameters = {**config.rope_parameters, "mrope_section": sections}
    return found


def without_states(config: Any, row: Family) -> Any:
    """Return the config without the type of layers that have a state, which have no RoPE."""
    kinds = getattr(config, "layer_types", None)
    if row.state_mixer is None or kinds is None:
        return config
    found = copy.deepcopy(config)
    found.layer_types = [kind for kind in kinds if kind != row.state_mixer.layer_type]
    return found


def rotary_by_theta(
    rotary: type[nn.Module], config: Any, key: str, device: str
) -> dict[float, nn.Module]:
    """Build the rotary embeddings of a model that lists a theta for each layer, by theta."""
    found = {}
    for theta in sorted({theta for theta in getattr(config, key) if theta}):
        own = copy.deepcopy(config)
        own.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
        found[theta] = rotary(own).to(device)
    return found
