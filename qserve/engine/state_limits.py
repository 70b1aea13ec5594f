"""What does not work yet with models whose layers have states, and what is off. Knows settings.

A state stands for all tokens before it. What goes back, or shares a beginning, or moves to another
place would need copies of it.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.memory import GIB
from qserve.engine.model_runner import ModelRunner
from qserve.engine.state_slots import StatePool
from qserve.engine.state_snapshots import StateSnapshots
from qserve.handling import Handling
from qserve.model.model_config import ModelConfig

logger = logging.getLogger(__name__)


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


def finds_prefixes(config: EngineConfig, model: ModelConfig) -> bool:
    """A state is known behind a request's last token alone: a common start needs a copy of it."""
    return config.enable_prefix_caching and bool(not model.has_states or config.num_state_snapshots)


def make_states(config: EngineConfig, model: ModelConfig, runner: ModelRunner) -> StatePool:
    """The slots of a runner's states, said in the log with what they rule out."""
    if not model.has_states:
        return StatePool(None)
    count, num_snapshots = runner.num_state_slots, runner.num_snapshots
    size = runner.bytes_of_states / GIB
    text = "States: %d slots of requests, %d of snapshots (--num-state-snapshots), %.2f GiB"
    logger.info(text, count, num_snapshots, size)
    if config.enable_prefix_caching and not num_snapshots:
        logger.info("Prefix cache: off, since layers of this model have states, and no snapshots")
    return StatePool(count)


def make_snapshots(
    config: EngineConfig, model: ModelConfig, runner: ModelRunner
) -> StateSnapshots | None:
    """The slots of copies, which stand behind those of requests; None: there are none."""
    if not (model.has_states and runner.num_snapshots):
        return None
    return StateSnapshots(runner.num_state_slots, runner.num_snapshots, config.block_size)
