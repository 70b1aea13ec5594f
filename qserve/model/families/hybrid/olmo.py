"""OLMo-Hybrid: gated delta nets, and attention in every fourth layer.

Layers with attention are those of OLMo 3, without RoPE in published files. Tokens write up to
twice their value into the states of the nets (`linear_allow_neg_eigval`).
"""

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama, olmo2
from qserve.model.families.hybrid import qwen3_next
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig

NORM_EPS = 1e-5  # of the nets, whatever rms_norm_eps is


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    if not config.state_layers[weights.number]:
        return olmo2.build_layer(config, weights)
    write_factor = 2.0 if config.values["linear_allow_neg_eigval"] else 1.0
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=qwen3_next.build_delta_net(
            config, weights, eps=NORM_EPS, write_factor=write_factor
        ),
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=llama.build_mlp(config, weights),
    )
