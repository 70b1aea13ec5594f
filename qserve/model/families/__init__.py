"""Decoders of the served model families, one module each.

`build(config, weights)` of a module assembles the decoder from blocks. The family's row in
formats/families.py names the module, and has tensor names, shapes and biases.
"""

import importlib
from types import ModuleType

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Build the decoder of the config's family."""
    return _module(config).build(config, weights)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    """Build one layer of the family, for the draft layers that some checkpoints have."""
    return _module(config).build_layer(config, weights)


def _module(config: ModelConfig) -> ModuleType:
    return importlib.import_module(f"qserve.model.families.{config.family.builder}")
