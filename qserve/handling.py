"""Handling: what a request asks of the engine beside its sampling. Loads no torch."""

from dataclasses import dataclass

from qserve.beam_search_params import BeamSearchParams
from qserve.errors import ParameterError
from qserve.lora.request import LoRARequest
from qserve.pooling_params import PoolingParams

MAX_SALT_CHARS = 256
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """When a request is computed, with whom it shares, what it pools. Raises ParameterError."""

    priority: int = 0  # lower goes first, under --scheduling-policy priority
    cache_salt: str = ""  # it shares KV pages with requests of the same salt alone
    timeout: float | None = None  # seconds from its arrival, then it ends with an error
    pooling: PoolingParams | None = None  # make vectors of the prompt, and generate nothing
    beam_search: BeamSearchParams | None = None  # generate the best beams, all at once
    lora: LoRARequest | None = None  # the adapter that it runs with

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            raise ParameterError(
                "priority", f"expected -{MAX_PRIORITY} to {MAX_PRIORITY}, found {self.priority}"
            )
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise ParameterError(
                "cache_salt",
                f"expected at most {MAX_SALT_CHARS} characters, found {len(self.cache_salt)}",
            )
        if self.timeout is not None and not self.timeout > 0:
            raise ParameterError("timeout", f"expected more than 0 seconds, found {self.timeout}")


DEFAULT = Handling()
