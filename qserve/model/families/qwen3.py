"""Qwen3: Llama with a norm over each head's queries and keys, before the rotation."""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.rotary import Rotary
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.model_config import ModelConfig
from qserve.model.weights import LayerWeights, Weights


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights, rotary: Rotary) -> Layer:
    q_norm, k_norm = (weights.norm(f"self_attn.{name}_norm") for name in "qk")
    return llama.build_layer(config, weights, rotary, q_norm=q_norm, k_norm=k_norm)
