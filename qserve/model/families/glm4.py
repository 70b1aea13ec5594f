"""GLM-4 (dense) and Kolibri 1: norms before and after attention and MLP.

GLM-4 has an interleaved rotary embedding over half of each head, Kolibri has experts and head
norms. On disk gate and up of GLM-4 are one matrix; the family's row in formats/families.py says so.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    head_norms = {
        f"{x}_norm": weights.norm(f"self_attn.{x}_norm")
        for x in "qk"
        if weights.has_norm(f"self_attn.{x}_norm")
    }
    has_experts = config.family.experts is not None
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=llama.build_attention(config, weights, **head_norms),
        attention_end=BranchEnd(llama.build_norm(config, weights, "post_self_attn_layernorm")),
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=(moe if has_experts else llama).build_mlp(config, weights),
        mlp_end=BranchEnd(llama.build_norm(config, weights, "post_mlp_layernorm")),
    )
