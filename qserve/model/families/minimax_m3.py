"""MiniMax-M3 (text): experts, and attention whose indexer selects blocks of keys.

Indexers are loaded only if contexts may be longer than what a query sees.
"""

from qserve.model.blocks.attention import Attention
from qserve.model.blocks.block_attention import BlockAttention
from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=_build_attention(config, weights),
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=moe.build_mlp(config, weights),
    )


def _build_attention(config: ModelConfig, weights: LayerWeights) -> Attention:
    norms = {f"{name}_norm": weights.norm(f"self_attn.{name}_norm") for name in "qk"}
    indexer = weights.block_indexer()
    if indexer is None:
        return llama.build_attention(config, weights, **norms)
    return llama.build_attention(config, weights, BlockAttention, indexer=indexer, **norms)
