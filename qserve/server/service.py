"""Service: what every route needs of the running server."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from qserve.engine.request import RequestEvent
from qserve.handling import Handling
from qserve.lora.request import LoRARequest
from qserve.profile.profiler_config import ProfilerConfig
from qserve.sampling_params import SamplingParams
from qserve.server.adapters import ServedAdapters
from qserve.server.admission import Admission
from qserve.server.budget import Budget
from qserve.server.job import Job
from qserve.server.metrics import Metrics
from qserve.server.preparation import Preparation
from qserve.server.served_model import ServedModel
from qserve.server.tracing import Tracing
from qserve.text import Tokenizer


class Client(Protocol):
    """The part of EngineClient that the server uses."""

    max_model_len: int
    vocab_size: int

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_restarting(self) -> bool: ...

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        watch: Callable[[RequestEvent], None],
        client: str,
        *,
        group: str,
        handling: Handling,
    ) -> AsyncIterator[RequestEvent]: ...

    def reset_prefix_cache(self) -> None: ...

    async def profile(self, config: ProfilerConfig | None) -> str: ...

    async def load_adapter(self, lora: LoRARequest) -> str: ...

    def unload_adapter(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The engine, the tokenizer and the server's settings."""

    client: Client
    tokenizer: Tokenizer
    model_names: tuple[str, ...]  # that clients may use; replies state the first
    defaults: dict[str, float]  # sampling fields that the model's folder sets
    chat_special_tokens: bool
    auto_tool_parser: str | None
    reasoning_parser: str | None
    max_body_bytes: int
    bodies: Budget  # bytes of bodies that are being received or prepared
    admission: Admission
    preparation: Preparation
    metrics: Metrics
    tracing: Tracing = field(default_factory=Tracing)
    request_timeout: float | None = None  # seconds that an answer may take
    is_stopping: Callable[[], bool] = lambda: False
    priority_counts: bool = True  # under the engine's scheduling policy
    salt_by_key: bool = False  # KV pages are shared within an API key alone
    resets_cache: bool = False  # on request of a client
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    created: int = field(default_factory=lambda: int(time.time()))
    scanning: asyncio.Lock = field(default_factory=asyncio.Lock)  # a slice in a turn of the loop

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def model(self) -> ServedModel:
        return ServedModel(
            names=self.model_names,
            tokenizer=self.tokenizer,
            defaults=self.defaults,
            max_model_len=self.client.max_model_len,
            vocab_size=self.client.vocab_size,
            chat_special_tokens=self.chat_special_tokens,
            auto_tool_parser=self.auto_tool_parser,
            reasoning_parser=self.reasoning_parser,
            adapters=self.adapters.of_name,
        )

    def name_for(self, job: Job) -> str:
        """What a reply calls the model: the adapter's name where the job has one."""
        lora = job.handling.lora
        return self.model_name if lora is None else lora.lora_name


def service_of(request: Request) -> Service:
    """The service of the app that a request came to."""
    return request.app.state.service
