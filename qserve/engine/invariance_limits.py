"""Settings and model traits that --batch-invariant does not support."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.fallback_limits import is_fallback
from qserve.engine.state_limits import Limit, check_limits
from qserve.model.model_config import ModelConfig

FLAG = "--batch-invariant"
LIMITS = (
    Limit(
        "--kv-cache-dtype int4",
        lambda config: config.kv_cache_dtype == "int4",
        "no kernel with a fixed order reads 4-bit pages",
    ),
    Limit(
        "--spec-acceptance",
        lambda config: config.speculation is not None and config.speculation.acceptance != "exact",
        "outputs then depend on the drafts, and drafts on the other requests",
    ),
)


class _Trait(NamedTuple):
    is_there: Callable[[ModelConfig], bool]
    reason: str


TRAITS = (
    _Trait(is_fallback, "transformers computes its layers"),
    _Trait(
        lambda model: bool(model.family.streams),
        "plain torch multiplies its streams of hidden states, in an order that depends on the rows",
    ),
)


def check_invariance(config: EngineConfig, model: ModelConfig) -> None:
    """Raise InputError if --batch-invariant is set and a setting or the model does not allow it."""
    if not config.batch_invariant:
        return
    check_limits(LIMITS, config, FLAG, "remove one")
    for trait in TRAITS:
        if trait.is_there(model):
            raise InputError(
                FLAG,
                f"does not work with {model.family.architecture}: {trait.reason}",
                "remove it, or serve another model",
            )


def check_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InputError for float32 on a GPU, where matrix products have no fixed order."""
    if config.batch_invariant and dtype == torch.float32 and device.type == "cuda":
        raise InputError(FLAG, "does not work in float32 on a GPU", "use --dtype bfloat16")
