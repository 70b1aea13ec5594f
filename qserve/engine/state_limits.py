"""What does not work yet with models whose layers have states. Knows settings, no tensors.

A state stands for all tokens before it. What goes back, or shares a beginning, or moves to another
place would need copies of it.
"""

from collections.abc import Callable
from typing import NamedTuple

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.handling import Handling
from qserve.model.model_config import ModelConfig


class Limit(NamedTuple):
    flag: str
    is_asked_for: Callable[[EngineConfig], bool]
    reason: str


LIMITS = (
    Limit(
        "--speculative-config",
        lambda config: config.speculation is not None,
        "a draft that is refused cannot be taken back out of a state",
    ),
    Limit(
        "--kv-transfer-config",
        lambda config: config.kv_transfer is not None,
        "states are not sent with the pages",
    ),
    Limit(
        "--kv-offload-gb",
        lambda config: config.kv_offload_gb > 0,
        "pages on the host would be of use with the states at their ends alone",
    ),
    Limit(
        "--tensor-parallel-size",
        lambda config: config.tensor_parallel_size > 1,
        "the heads of states are not shared out over ranks",
    ),
    Limit(
        "--pipeline-parallel-size",
        lambda config: config.pipeline_parallel_size > 1,
        "states are kept in one process",
    ),
    Limit(
        "--enable-lora",
        lambda config: config.enable_lora,
        "the linears of its layers are in another order than adapters have them",
    ),
)


def check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Raise InputError for a setting that the model's states do not allow."""
    if not model.has_states:
        return
    for limit in LIMITS:
        if limit.is_asked_for(config):
            raise InputError(
                limit.flag,
                f"does not work with {model.family.architecture}, whose layers have states:"
                f" {limit.reason}",
                "leave it out, or serve another model",
            )


def check_handling(subject: str, handling: Handling, model: ModelConfig) -> None:
    """The same for what one request asks for."""
    if model.has_states and handling.beam_search is not None:
        raise InputError(
            f"{subject} use_beam_search",
            f"does not work with {model.family.architecture}, whose layers have states: beams"
            " cannot share a beginning",
            "leave it out, or ask for n outputs",
        )
