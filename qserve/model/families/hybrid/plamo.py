"""PLaMo 2: Mamba-2 layers, and some attention layers, in the layers of PLaMo 3.

dt, B and C of Mamba-2 are computed after the convolution. Norms of queries and keys have weights of
their own for each head. The family's row has the other differences.
"""

from formats.architecture.sizes import stated_size
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.states.plamo_mamba import PlamoMamba, PlamoMambaShape
from qserve.model.decoder import Decoder
from qserve.model.families import afmoe, llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    has_state = config.state_layers[weights.number]
    return afmoe.build_layer(config, weights, build_mamba(config, weights) if has_state else None)


def build_mamba(config: ModelConfig, weights: LayerWeights) -> PlamoMamba:
    mixer, values = config.family.state_mixer, config.values
    x_proj, dt_proj = mixer.selection
    return PlamoMamba(
        PlamoMambaShape(
            heads=weights.state_shard.num_heads,
            head_dim=stated_size(values, "mamba_d_head"),
            state=stated_size(values, "mamba_d_state"),
            rank=stated_size(values, "mamba_dt_rank"),
            taps=stated_size(values, "mamba_d_conv"),
        ),
        in_proj=weights.state_linear(mixer.inputs),
        x_proj=weights.state_linear(x_proj),
        dt_proj=weights.state_linear(dt_proj),
        out_proj=weights.state_linear(mixer.out),
        eps=config.norm_eps,
        kernel=weights.kernels.get("states"),
        **weights.state_tensors(),
    )
