"""Load a model folder into a Decoder on a device, layer by layer, then audit it.

The tensors of a layer are read, merged (q, k, v; gate, up), moved to the device, prepared for their
kernels, and dropped from the host before those of the next layer. The audit checks that every
tensor of the folder was used.
"""

from collections.abc import Callable, Mapping

import torch

from formats.errors import InputError
from qserve.model import families
from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.fallback.loading import load_fallback
from qserve.model.fallback.support import BUILDER
from qserve.model.loading.weights import Source, Weights
from qserve.model.model_config import ModelConfig
from qserve.model.tp_plan import TpPlan
from qserve.parallel.ranks import ALONE, Ranks


def load(
    config: ModelConfig,
    source: Source,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    progress: bool = True,
    kernels: Mapping[str, str] | None = None,
    ranks: Ranks = ALONE,
    on_layer: Callable[[Layer], None] | None = None,
) -> Decoder:
    """Build the decoder. Raises CheckpointError on missing, leftover or misshapen tensors.

    Raises InputError if the family does not support `dtype`.

    `kernels`: kernels selected or excluded by name, as in EngineConfig. `ranks`: this rank among
    those of the model; the decoder holds this rank's shard. `on_layer`: called with each finished
    layer.
    """
    if dtype == torch.float16 and not config.family.float16:
        raise InputError(
            "--dtype float16",
            f"activations of {config.family.architecture} exceed the range of this dtype",
            "use --dtype bfloat16",
        )
    if config.family.builder == BUILDER:
        return load_fallback(
            config,
            source,
            device=device,
            dtype=dtype,
            kernels=kernels or {},
            communicator=ranks.communicator,
        )
    tp_plan = TpPlan(config, ranks.communicator, ranks.experts, ranks.exchange)
    config = tp_plan.local(config)
    weights = Weights(
        config,
        source,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        progress=progress,
        kernels=kernels,
        tp_plan=tp_plan,
        pipeline=ranks.pipeline,
        on_layer=on_layer,
    )
    decoder = families.build(config, weights)
    decoder.classifier = weights.classifier()
    decoder.parts, decoder.linears = weights.parts, weights.linears
    decoder.local_experts = weights.local_experts
    weights.audit()
    return decoder
