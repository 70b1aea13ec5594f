"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, ERNIE, MiniMax-M2, gpt-oss, GLM-4.5, dots.llm1 and Ling:
Llama with experts instead of an MLP.

The family's row has the differences: the routing rule, the shared expert, the layers without
experts, head norms.
"""

from qserve.model.blocks.layer import FeedForward, Layer
from qserve.model.blocks.media_experts import MediaExperts, Mixture
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.moe import MoeMlp, SharedExpert
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    first, second, *of_heads = (norm.name for norm in config.family.norms)
    head_norms = {
        argument: weights.norm(name)
        for argument, name in zip(("q_norm", "k_norm"), of_heads, strict=False)
        if weights.has_norm(name)
    }
    return Layer(
        attention_norm=llama.build_norm(config, weights, first),
        attention=llama.build_attention(config, weights, **head_norms, **weights.sinks()),
        mlp_norm=llama.build_norm(config, weights, second),
        mlp=build_mlp(config, weights),
    )


def build_mlp(config: ModelConfig, weights: LayerWeights) -> FeedForward | MediaExperts:
    experts = config.family.experts
    if not experts.is_in(weights.number, config.values):
        return llama.build_mlp(config, weights)
    if experts.media_inner:
        return _build_media_experts(config, weights)
    before = after = None
    if experts.latent:
        first, last = experts.latent
        before, after = weights.linear(first), weights.partial_linear(last)
    return MoeMlp(
        router=weights.router(),
        experts=weights.experts(),
        shared=None if experts.shared is None else _build_shared(config, weights),
        communicator=weights.tp_plan.communicator,
        numbers_E=weights.expert_numbers(),
        scales_inputs=experts.scaled_inputs,
        before=before,
        after=after,
        exchange=weights.tp_plan.exchange,
    )


def _build_media_experts(config: ModelConfig, weights: LayerWeights) -> MediaExperts:
    text, media = (
        Mixture(router, weights.experts(of_media=of_media))
        for router, of_media in zip(weights.media_routers(), (False, True), strict=True)
    )
    return MediaExperts(
        text=text,
        media=media,
        shared=_build_shared(config, weights),
        communicator=weights.tp_plan.communicator,
    )


def _build_shared(config: ModelConfig, weights: LayerWeights) -> SharedExpert:
    experts = config.family.experts
    mlp = Mlp(
        up_proj=weights.linear(experts.shared.gate_up, down=experts.shared.down),
        down_proj=weights.linear(experts.shared.down, summed=False),
        gated=experts.gated,
        **config.mlp_activation(weights.number),
    )
    return SharedExpert(mlp, weights.shared_gate())
