"""OLMo 2, OLMo 3, FlexOlmo and EXAONE 4: norms after attention and MLP, none before them.

Queries and keys have norms too: over all heads in OLMo, per head in EXAONE. config.json and
formats/architecture/rows have the windows and the rotary embedding of each layer.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd, Norm
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    eps, has_experts = config.norm_eps, config.family.experts is not None
    return Layer(
        attention_norm=Norm(None, eps),
        attention=llama.build_attention(
            config,
            weights,
            q_norm=weights.norm("self_attn.q_norm"),
            k_norm=weights.norm("self_attn.k_norm"),
        ),
        attention_end=BranchEnd(llama.build_norm(config, weights, "post_attention_layernorm")),
        mlp_norm=Norm(None, eps),
        mlp=(moe if has_experts else llama).build_mlp(config, weights),
        mlp_end=BranchEnd(llama.build_norm(config, weights, "post_feedforward_layernorm")),
    )
