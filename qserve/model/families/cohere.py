"""Command R (Cohere, Cohere 2 and its experts) and Phi: attention and MLP in parallel, with one
shared norm.

The family's row has the other differences from Llama: interleaved rotary embedding, windows, the
factor of logits.
"""

from qserve.model.blocks.layer import ParallelLayer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> ParallelLayer:
    experts, values = config.family.experts, config.values
    has_experts = experts is not None and experts.is_in(weights.number, values)
    averages = has_experts and experts.shared is not None
    averages = averages and values["shared_expert_combination_strategy"] == "average"
    return ParallelLayer(
        norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=llama.build_attention(config, weights),
        mlp=(moe if has_experts else llama).build_mlp(config, weights),
        mlp_end=BranchEnd(factor=0.5 if averages else 1.0),  # of routed and shared experts
    )
