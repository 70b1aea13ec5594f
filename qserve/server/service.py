"""Service: everything that routes need to serve one model."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from qserve.engine.control.commands import AnyCommand, EngineState, Outcome
from qserve.engine.token_event import TokenEvent
from qserve.lora.request import LoRARequest
from qserve.multimodal.reader import MediaReader
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.profile.profiler_config import ProfilerConfig
from qserve.server.adapters import ServedAdapters
from qserve.server.http.api_key import Keys
from qserve.server.http.clients import Admission, Budget
from qserve.server.observability.metrics import Metrics
from qserve.server.observability.tracing import Tracing
from qserve.server.prepare.preparation import Preparation
from qserve.server.requests.job import Job
from qserve.server.requests.served_model import TEXT_ONLY, ServedModel
from qserve.server.store.store import ResponseStore
from qserve.text.tokenizer import Tokenizer


class Client(Protocol):
    """The methods of EngineClient that the server uses."""

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
        watch: Callable[[TokenEvent], None],
        client: str,
        *,
        group: str,
        options: RequestOptions,
    ) -> AsyncIterator[TokenEvent]: ...

    def reset_prefix_cache(self) -> None: ...

    async def profile(self, config: ProfilerConfig | None) -> str: ...

    async def load_adapter(self, lora: LoRARequest) -> str: ...

    def unload_adapter(self, name: str) -> None: ...

    @property
    def state(self) -> EngineState: ...

    async def operate(self, command: AnyCommand) -> tuple[Outcome, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Engine client, tokenizer and settings of one model of a running server."""

    client: Client
    tokenizer: Tokenizer
    model_names: tuple[str, ...]  # names that requests may use; replies contain the first
    defaults: dict[str, float]  # sampling fields from generation_config.json
    chat_special_tokens: bool
    auto_tool_parser: str | None
    reasoning_parser: str | None
    structured_output_strict: bool
    max_body_bytes: int
    bodies: Budget  # bytes of bodies that are in memory
    admission: Admission
    preparation: Preparation
    metrics: Metrics
    tracing: Tracing = field(default_factory=Tracing)
    request_timeout: float | None = None  # seconds
    is_stopping: Callable[[], bool] = lambda: False
    priority_counts: bool = True  # True: the scheduling policy uses priorities
    salt_by_key: bool = False  # True: share KV pages only between requests with the same API key
    resets_cache: bool = False  # True: clients may empty the prefix cache
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    store: ResponseStore | None = None  # None: responses are not stored
    media: MediaReader | None = None  # None: images and videos are refused in this process
    without_media: str = TEXT_ONLY  # reason of the refusal
    keys: Keys | None = None  # valid API keys
    weights_folder: Callable[[str], str] = str  # maps a path or hub name to a local folder
    refuses_paused: bool = False  # True: requests get 503 while the model is paused or asleep
    has_admin_routes: bool = False
    num_engines: int = 1  # more than 1 with data parallelism
    created: int = field(default_factory=lambda: int(time.time()))
    scanning: asyncio.Lock = field(
        default_factory=asyncio.Lock
    )  # held while one slice of a body is scanned: one slice per iteration of the event loop

    @property
    def is_refusing(self) -> bool:
        """True if new requests get 503 because the model is paused or asleep."""
        if not self.refuses_paused:
            return False
        state = self.client.state
        return state.is_paused or state.is_sleeping

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
            structured_output_strict=self.structured_output_strict,
            adapters=self.adapters.of_name,
            media=self.media,
            without_media=self.without_media,
        )

    def name_for(self, job: Job) -> str:
        """Return the model name for a reply: the adapter's name, if the job has an adapter."""
        lora = job.options.lora
        return self.model_name if lora is None else lora.lora_name


SERVICE = "service"  # key in a request's scope, set by SelectModel


def service_of(request: Request) -> Service:
    """Return the Service of a request's model; of the first model if the request names none."""
    return request.scope.get(SERVICE) or request.app.state.service


def services_of(request: Request) -> tuple[Service, ...]:
    """Return the Services of all models of the server."""
    return request.app.state.services
