"""AFMoE (Trinity): experts, gated attention, norms before and after attention and MLP.

The family's row has the other differences from Llama: the routing rule, layers with windows (only
these have rotary embedding), and the linear that computes the gates.
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
    head_norms = {f"{name}_norm": weights.norm(f"self_attn.{name}_norm") for name in "qk"}
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=llama.build_attention(config, weights, **head_norms),
        attention_end=BranchEnd(llama.build_norm(config, weights, "post_attention_layernorm")),
        mlp_norm=llama.build_norm(config, weights, "pre_mlp_layernorm"),
        mlp=moe.build_mlp(config, weights),
        mlp_end=BranchEnd(llama.build_norm(config, weights, "post_mlp_layernorm")),
    )
