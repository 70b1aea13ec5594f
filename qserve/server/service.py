"""Service: what every route needs of the running server."""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from qserve.engine.request import RequestEvent
from qserve.sampling_params import SamplingParams
from qserve.server.admission import Admission
from qserve.server.errors import ApiError
from qserve.server.metrics import Metrics
from qserve.text import Tokenizer


class Client(Protocol):
    """The part of EngineClient that the server uses."""

    max_model_len: int
    vocab_size: int

    @property
    def is_alive(self) -> bool: ...

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        watch: Callable[[RequestEvent], None],
        *,
        group: str,
    ) -> AsyncIterator[RequestEvent]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The engine, the tokenizer and the server's settings."""

    client: Client
    tokenizer: Tokenizer
    model_name: str
    defaults: dict[str, float]  # sampling fields that the model's folder sets
    max_body_bytes: int
    admission: Admission
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError(404) for a model that is not served; no name means the one that is."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}.",
                "model",
            )
