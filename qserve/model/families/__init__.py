"""The decoders of served families, a module each: `build(config, weights)` makes one of blocks.

A row of formats/families.py names its module, and holds the names, shapes and biases.
"""

import importlib

from qserve.model.decoder import Decoder
from qserve.model.model_config import ModelConfig
from qserve.model.weights import Weights


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The decoder of the config's family."""
    module = importlib.import_module(f"qserve.model.families.{config.family.builder}")
    return module.build(config, weights)
