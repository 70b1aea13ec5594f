"""From a model folder to a Decoder on a device, one tensor group at a time. Ends with an audit.

The tensors of a layer are read, merged (q, k, v; gate, up), moved, prepared for their kernels and
dropped from the host before the next layer's. Every tensor of the folder must be used.
"""

from collections.abc import Mapping

import torch

from formats.errors import InputError
from qserve.model import families
from qserve.model.decoder import Decoder
from qserve.model.model_config import ModelConfig
from qserve.model.sharing import Sharing
from qserve.model.weights import Source, Weights
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
) -> Decoder:
    """Build the decoder. Raises CheckpointError on missing, leftover or misshapen tensors.

    Raises InputError where the family does not run in `dtype`.

    `kernels`: asked for or forbidden by name, as EngineConfig has them. `ranks`: those over
    which the model is shared out; the decoder has our part.
    """
    if dtype == torch.float16 and not config.family.float16:
        raise InputError(
            "--dtype float16",
            f"activations of {config.family.architecture} leave its range",
            "use --dtype bfloat16",
        )
    sharing = Sharing(config, ranks.communicator)
    config = sharing.local(config)
    weights = Weights(
        config,
        source,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        progress=progress,
        kernels=kernels,
        sharing=sharing,
        pipeline=ranks.pipeline,
    )
    decoder = families.build(config, weights)
    decoder.classifier, decoder.parts = weights.classifier(), weights.parts
    weights.audit()
    return decoder
