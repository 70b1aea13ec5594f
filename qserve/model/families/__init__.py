"""The decoders of served families, a module each: `build(config, weights)` makes one of blocks.

A row of formats/families.py names its module, and holds the names, shapes and biases.
"""

import importlib
from types import ModuleType

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """The decoder of the config's family."""
    return _module(config).build(config, weights)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    """One layer of it, as it stands behind the others in checkpoints that have some for drafts."""
    return _module(config).build_layer(config, weights)


def _module(config: ModelConfig) -> ModuleType:
    return importlib.import_module(f"qserve.model.families.{config.family.builder}")
