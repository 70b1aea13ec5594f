"""Falcon-H1: attention and Mamba-2 in parallel in each layer, with constant factors throughout.

The factors of embeddings and logits are in the family's row. A factor on the input of a linear
without bias is applied to its output instead.
"""

import torch

from formats.errors import config_error
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.norm import BranchEnd
from qserve.model.blocks.states.mamba2 import Mamba2
from qserve.model.blocks.states.side_by_side import SideBySide
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.families.hybrid import granite
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    values = config.values
    into = values["attention_in_multiplier"]  # multiplies queries, keys and values
    scale = config.head_dim**-0.5 * into**2 * values["key_multiplier"]
    _, of_mlp = _factors(config, "mlp_multipliers", 2)
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=SideBySide(
            attention=llama.build_attention(config, weights, scale=scale),
            mamba=build_mamba(config, weights),
            attention_factor=into * values["attention_out_multiplier"],
            mamba_factor=values["ssm_out_multiplier"],
        ),
        mlp_norm=llama.build_norm(config, weights, "pre_ff_layernorm"),
        mlp=build_mlp(config, weights),
        mlp_end=BranchEnd(factor=of_mlp),
    )


def build_mamba(config: ModelConfig, weights: LayerWeights) -> Mamba2:
    values, shape = config.values, granite.mamba_shape(config, weights)
    of_groups = shape.groups * shape.state
    sizes = torch.tensor([shape.inner, shape.inner, of_groups, of_groups, shape.heads])
    of_parts = torch.tensor(_factors(config, "ssm_multipliers", len(sizes)))
    of_parts = of_parts * values["ssm_in_multiplier"]
    factors = None
    if not (of_parts == 1).all():
        factors = weights.constant(of_parts.repeat_interleave(sizes))
    return granite.build_mamba(
        config, weights, norm_first=values["mamba_norm_before_gate"], factors=factors
    )


def build_mlp(config: ModelConfig, weights: LayerWeights) -> Mlp:
    family, (of_gate, _) = config.family, _factors(config, "mlp_multipliers", 2)
    return Mlp(
        up_proj=weights.linear(family.gate_up, down=family.down),
        down_proj=weights.linear(family.down),
        activation=config.activation,
        gate_factor=of_gate,
    )


def _factors(config: ModelConfig, key: str, count: int) -> list[float]:
    """Return a list of factors of config.json. Raises CheckpointError for another length."""
    found = config.values[key]
    if len(found) != count:
        raise config_error(key, f"{count} numbers", found)
    return found
