"""Mamba, FalconMamba and Mamba 2: each layer is one mixer. No layer has attention or an MLP.

In FalconMamba dt, B and C have norms without weights. The residual stream has the activations'
dtype, as in vLLM; `residual_in_fp32` is ignored.
"""

import torch

from formats.architecture.sizes import check_eps
from formats.errors import config_error
from qserve.model.blocks.lone_layer import LoneLayer
from qserve.model.blocks.states.mamba1 import Mamba1, Mamba1Shape
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.families.hybrid import granite
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> LoneLayer:
    norm = llama.build_norm(config, weights, "norm")
    if config.family.state_mixer.kind == "Mamba-2":
        return LoneLayer(norm=norm, block=granite.build_mamba(config, weights))
    norms, eps = {}, config.norm_eps
    if config.family.model_type == "falcon_mamba":
        rank, state = (_size(config, name) for name in ("mamba_dt_rank", "mamba_d_state"))
        sizes = {"dt_norm": rank, "b_norm": state, "c_norm": state}
        norms = {name: weights.constant(torch.ones(size)) for name, size in sizes.items()}
        eps = config.values["mixer_rms_eps"]
        check_eps("mixer_rms_eps", eps)
    return LoneLayer(norm=norm, block=build_mamba(config, weights, eps, **norms))


def build_mamba(
    config: ModelConfig, weights: LayerWeights, eps: float, **norms: torch.Tensor
) -> Mamba1:
    """Build a Mamba-1 mixer. `norms`: weights of norms that the checkpoint does not store."""
    mixer = config.family.state_mixer
    x_proj, dt_proj = mixer.selection
    return Mamba1(
        Mamba1Shape(
            channels=weights.state_shard.num_heads,
            state=_size(config, "mamba_d_state"),
            rank=_size(config, "mamba_dt_rank"),
            taps=_size(config, "mamba_d_conv"),
        ),
        in_proj=weights.state_linear(mixer.inputs),
        x_proj=weights.state_linear(x_proj),
        dt_proj=weights.state_linear(dt_proj),
        out_proj=weights.state_linear(mixer.out),
        eps=eps,
        kernel=weights.kernels.get("states"),
        **weights.state_tensors(),
        **norms,
    )


def _size(config: ModelConfig, name: str) -> int:
    """Return a size of the mixer. Raises CheckpointError if config.json states no valid one."""
    found = config.sizes[name]
    if found is None:
        key = config.family.config_keys.get(name, name)
        raise config_error(key, "a number above 0", config.values.get(name))
    return found
