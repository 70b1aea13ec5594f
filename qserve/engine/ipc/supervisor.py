"""EngineSupervisor: an engine process that is restarted a limited number of times when it dies.

The class has the interface of EngineClient.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.control.commands import AnyCommand, EngineState, Outcome, UpdateWeights
from qserve.engine.ipc.client import ENGINE_NAME, EngineClient, Limits, Watch, WatchEngine, ignore
from qserve.engine.ipc.waiting import ENGINE, WaitingEngine
from qserve.engine.token_event import TokenEvent
from qserve.errors import relayed_error
from qserve.lora.request import LoRARequest
from qserve.params.request_options import DEFAULT, RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.profile.profiler_config import ProfilerConfig

# After an engine has run this long, the number of remaining restarts is reset.
PROVEN_SECONDS = 600.0
PAUSE_SECONDS = 1.0  # wait before a restart: GPU memory is freed shortly after a process exits

logger = logging.getLogger(__name__)


class EngineSupervisor:
    """A running engine. `EngineSupervisor.start` creates it, `close` ends it."""

    def __init__(
        self,
        config: EngineConfig,
        restarts: int,
        options: dict,
        on_restart: Callable[[], None] | None,
    ) -> None:
        self._config, self._restarts, self._options = config, restarts, options
        self._name = options["name"]
        self._on_restart = on_restart
        self._client: EngineClient
        self._given_up = asyncio.Event()
        self._num_left = restarts
        self._is_starting = False
        self._update: UpdateWeights | None = None  # last weight update, repeated after a restart
        self._task: asyncio.Task | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        restarts: int = 0,
        engine: str = ENGINE,
        watch: WatchEngine = ignore,
        limits: Limits | None = None,
        name: str = ENGINE_NAME,
        on_restart: Callable[[], None] | None = None,
        arguments: Sequence[str] = (),
        check: bool = True,
        waiting: WaitingEngine | None = None,
    ) -> "EngineSupervisor":
        """Start the engine. If the first start fails, raises InputError without a restart.

        `on_restart` is called after each restart. Other arguments are those of EngineClient.start.
        """
        options = {"engine": engine, "watch": watch, "limits": limits, "arguments": arguments}
        options |= {"check": check, "name": name}
        supervisor = cls(config, restarts, options, on_restart)
        supervisor._client = await EngineClient.start(config, waiting=waiting, **options)
        supervisor._task = asyncio.create_task(supervisor._supervise())
        return supervisor

    @property
    def max_model_len(self) -> int:
        return self._client.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._client.vocab_size

    @property
    def media_kinds(self) -> tuple[str, ...]:
        """Kinds of media that prompts may contain."""
        return self._client.media_kinds

    @property
    def no_vision(self) -> str:
        """Remedy if this vision-language model takes only text here; "" for any other model."""
        return self._client.no_vision

    @property
    def is_alive(self) -> bool:
        """True if a request can run now."""
        return self._client.is_alive

    @property
    def is_restarting(self) -> bool:
        """True if no request can run now, but the engine will be restarted."""
        return not self._client.is_alive and (self._is_starting or self._num_left > 0)

    async def wait_until_dead(self) -> None:
        """Wait until the engine is dead and will not be restarted."""
        await self._given_up.wait()

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        watch: Watch = ignore,
        client: str = "",
        group: str = "",
        options: RequestOptions = DEFAULT,
    ) -> AsyncIterator[TokenEvent]:
        """Run one request on the current engine, as EngineClient.generate does."""
        events = self._client.generate(
            request_id, prompt_token_ids, params, watch, client, group, options
        )
        async with aclosing(events):
            async for event in events:
                yield event

    async def stop_waiting(self, request_id: str) -> None:
        """Stop waiting for KV pages of a request: the other engine has finished or failed."""
        await self._client.stop_waiting(request_id)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: later requests find no KV pages of earlier ones."""
        self._client.reset_prefix_cache()

    async def profile(self, config: ProfilerConfig | None) -> str:
        """Start recording steps; None stops it. Returns an error message, or ""."""
        return await self._client.profile(config)

    @property
    def state(self) -> EngineState:
        """State of the engine after the last command."""
        return self._client.state

    async def operate(self, command: AnyCommand) -> tuple[Outcome, str]:
        """Run an operator's command, as EngineClient.operate does.

        A restarted engine repeats the last weight update. It is awake and not paused.
        """
        outcome, problem = await self._client.operate(command)
        if isinstance(command, UpdateWeights) and not problem:
            kept = UpdateWeights(folder=command.folder, version=outcome.state.weight_version)
            self._update = kept if command.is_kept else None
        return outcome, problem

    async def load_adapter(self, lora: LoRARequest) -> str:
        """Load an adapter. A restarted engine loads it again with its first request."""
        return await self._client.load_adapter(lora)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that already use it keep it."""
        self._client.unload_adapter(name)

    async def close(self) -> None:
        """End the engine. It is not restarted."""
        if self._task is not None:
            self._task.cancel()
            self._is_starting, self._num_left = False, 0
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._given_up.set()
        await self._client.close()

    async def _supervise(self) -> None:
        while True:
            started = time.monotonic()
            await self._client.wait_until_dead()
            if time.monotonic() - started > PROVEN_SECONDS:
                self._num_left = self._restarts
            await self._client.close()
            while not self._client.is_alive:
                if not self._num_left:
                    self._given_up.set()
                    return
                await self._start_again()

    async def _start_again(self) -> None:
        self._num_left, self._is_starting = self._num_left - 1, True
        logger.warning("%s restarts; %d more restarts are left", self._name, self._num_left)
        try:
            await asyncio.sleep(PAUSE_SECONDS)
            client = await EngineClient.start(self._config, **self._options)
            await self._update_again(client)
            self._client = client
            if self._on_restart is not None:
                self._on_restart()
        except (InputError, OSError) as error:
            logger.error("%s failed to restart: %s", self._name, error)
        finally:
            self._is_starting = False

    async def _update_again(self, client: EngineClient) -> None:
        """Repeat the last weight update on a restarted engine. Raises InputError."""
        if self._update is None:
            return
        _, problem = await client.operate(self._update)
        if problem:
            await client.close()
            raise relayed_error("the weights of the last update", problem)
        version = client.state.weight_version
        logger.info("%s has weights version %s", self._name, version)
