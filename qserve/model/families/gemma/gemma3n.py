"""Gemma 3n (text): AltUp layers, which compute one of four streams of hidden states.

Attention, shared keys and values, and layer inputs are those of Gemma 4. In the first layers the
MLP sets most of its gates to 0. The family's row has the types of layers.
"""

from functools import partial

from qserve.model.blocks.gemma.altup import AltUp, AltUpLayer, Laurel, SparseMlp
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.families.gemma import gemma4
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    decoder = llama.build_decoder(config, weights, build_layer)
    decoder.streams = weights.streams()
    return decoder


def build_layer(config: ModelConfig, weights: LayerWeights) -> AltUpLayer:
    local, learned = weights.config, weights.activation_tensors()
    own = {name: weights.constant(value) for name, value in learned.items()}
    norm = partial(llama.build_norm, local, weights)
    return AltUpLayer(
        altup=AltUp(
            router_norm=norm("altup.router_norm"),
            modality_router=own["modality_router"],
            prediction_coefs=own["prediction_coefs"],
            correction_coefs=own["correction_coefs"],
        ),
        laurel=Laurel(
            left=own["linear_left"],
            right=own["linear_right"],
            norm=norm("laurel.post_laurel_norm"),
        ),
        output_scale=own["correct_output_scale"],
        layer_input=weights.layer_input(),
        attention_norm=norm("input_layernorm"),
        attention=gemma4.build_attention(local, weights),
        attention_end=BranchEnd(norm("post_attention_layernorm")),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp=_feed_forward(local, weights),
        mlp_end=BranchEnd(norm("post_feedforward_layernorm")),
    )


def _feed_forward(config: ModelConfig, weights: LayerWeights) -> Mlp | SparseMlp:
    family, sparsity = config.family, config.values["activation_sparsity_pattern"][weights.number]
    if not sparsity:
        return llama.build_mlp(config, weights)
    return SparseMlp(
        up_proj=weights.linear(family.gate_up, down=family.down),
        down_proj=weights.linear(family.down),
        sparsity=sparsity,
        total=config.sizes["intermediate_size"],
        communicator=weights.tp_plan.communicator,
    )
