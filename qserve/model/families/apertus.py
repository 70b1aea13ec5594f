"""Apertus: Llama with query and key norms per head, and an ungated MLP with xIELU.

The family's row has the other differences: names of norms, and the tensors of the activation.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.xielu_mlp import XieluMlp
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    family = config.family
    head_norms = {f"{name}_norm": weights.norm(f"self_attn.{name}_norm") for name in "qk"}
    return Layer(
        attention_norm=llama.build_norm(config, weights, "attention_layernorm"),
        attention=llama.build_attention(config, weights, **head_norms),
        mlp_norm=llama.build_norm(config, weights, "feedforward_layernorm"),
        mlp=XieluMlp(
            up_proj=weights.linear(family.gate_up, down=family.down),
            down_proj=weights.linear(family.down),
            **weights.activation_tensors(),
        ),
    )
