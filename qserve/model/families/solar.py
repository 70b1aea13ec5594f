"""Solar Pro: Llama with skip connections between layers (formats/architecture/skip_connections.py).

Sources keep their input in the order of the layers, so all layers of a step run on one stage.
"""

from formats.architecture.skip_connections import skip_connections
from qserve.model.blocks.layer import KeptInput, SkipLayer
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    skips = [(skip, KeptInput()) for skip in skip_connections(config.values)]

    def build_layer(config: ModelConfig, weights: LayerWeights) -> SkipLayer:
        number = weights.number
        attention_norm, mlp_norm = (
            llama.build_norm(config, weights, norm.name) for norm in config.family.norms
        )
        return SkipLayer(
            attention_norm=attention_norm,
            attention=llama.build_attention(config, weights),
            mlp_norm=mlp_norm,
            mlp=llama.build_mlp(config, weights),
            keeps=tuple(kept for skip, kept in skips if number in skip.kept),
            mixes=tuple((kept, skip.factor) for skip, kept in skips if number in skip.mixed),
        )

    decoder = llama.build_decoder(config, weights, build_layer)
    decoder.is_sampled = False  # layers read what other layers keep
    return decoder
