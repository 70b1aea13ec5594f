"""RequestOptions: options of a request that do not affect sampling. Loads no torch."""

from dataclasses import dataclass

from qserve.errors import LEAVE_OUT, ParameterError
from qserve.lora.request import LoRARequest
from qserve.multimodal.media import MediaItem
from qserve.params.beam_search_params import BeamSearchParams
from qserve.pooling.params import PoolingParams

MAX_SALT_CHARS = 256
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Priority, cache isolation, deadline, task and media of a request. Raises ParameterError."""

    priority: int = 0  # lower runs first, with --scheduling-policy priority
    cache_salt: str = ""  # KV pages are shared only between requests with the same salt
    timeout: float | None = None  # seconds after arrival until the request ends with an error
    pooling: PoolingParams | None = None  # return vectors of the prompt instead of generating
    beam_search: BeamSearchParams | None = None  # generate the best beams together
    lora: LoRARequest | None = None  # LoRA adapter of the request
    # True: another engine prefills the prompt; wait for the KV pages (--kv-transfer-config peer)
    awaits_pages: bool = False
    is_for_another: bool = False  # True: prefill the prompt for an engine that awaits the KV pages
    media: tuple[MediaItem, ...] = ()  # media items of the prompt, sorted by position

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            raise ParameterError(
                "priority",
                f"expected -{MAX_PRIORITY} to {MAX_PRIORITY}, found {self.priority}",
                LEAVE_OUT,
            )
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise ParameterError(
                "cache_salt",
                f"expected at most {MAX_SALT_CHARS} characters, found {len(self.cache_salt)}",
                "send a hash of it",
            )
        if self.timeout is not None and not self.timeout > 0:
            raise ParameterError(
                "timeout", f"expected more than 0 seconds, found {self.timeout}", LEAVE_OUT
            )


DEFAULT = RequestOptions()
