"""ERNIE 4.5 VL: Llama with experts, of which one half serves text and the other half images."""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.media_experts import MediaExperts, Mixture
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    first, second = (norm.name for norm in config.family.norms)
    has_experts = config.family.experts.stand_in(weights.number, config.values)
    return Layer(
        attention_norm=llama.build_norm(config, weights, first),
        attention=llama.build_attention(config, weights),
        mlp_norm=llama.build_norm(config, weights, second),
        mlp=(_build_experts if has_experts else llama.build_mlp)(config, weights),
    )


def _build_experts(config: ModelConfig, weights: LayerWeights) -> MediaExperts:
    text, media = (
        Mixture(router, weights.experts(of_media=of_media))
        for router, of_media in zip(weights.media_routers(), (False, True), strict=True)
    )
    return MediaExperts(
        text=text,
        media=media,
        shared=moe.build_shared(config, weights),
        communicator=weights.sharing.communicator,
    )
