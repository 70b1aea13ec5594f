"""GLM-4 (dense): norms before and after attention and MLP; interleaved rotary embedding over half
of each head.

On disk gate and up are one matrix; the family's row in formats/families.py says so.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=llama.build_attention(config, weights),
        attention_end=BranchEnd(llama.build_norm(config, weights, "post_self_attn_layernorm")),
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=llama.build_mlp(config, weights),
        mlp_end=BranchEnd(llama.build_norm(config, weights, "post_mlp_layernorm")),
    )
