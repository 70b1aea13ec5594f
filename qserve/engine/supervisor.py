"""EngineSupervisor: an engine process that is started anew when it dies, a few times.

Looks like an EngineClient to those who use it. Knows no text and no HTTP.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.client import EngineClient, Limits, Watch, WatchEngine, ignore
from qserve.engine.process import ENGINE
from qserve.engine.request import RequestEvent
from qserve.handling import DEFAULT, Handling
from qserve.lora.request import LoRARequest
from qserve.profile.profiler_config import ProfilerConfig
from qserve.sampling_params import SamplingParams

# An engine that has lived so long was no failed attempt: the count of restarts begins again.
PROVEN_SECONDS = 600.0
PAUSE_SECONDS = 1.0  # before a start: a GPU's memory is free a moment after its process is gone

logger = logging.getLogger(__name__)


class EngineSupervisor:
    """A running engine. Made by `EngineSupervisor.start`, ended by `close`."""

    def __init__(
        self,
        config: EngineConfig,
        restarts: int,
        options: dict,
        on_restart: Callable[[], None] | None,
    ) -> None:
        self._config, self._restarts, self._options = config, restarts, options
        self._on_restart = on_restart
        self._client: EngineClient
        self._given_up = asyncio.Event()
        self._num_left = restarts
        self._is_starting = False
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
        on_restart: Callable[[], None] | None = None,
        arguments: Sequence[str] = (),
    ) -> "EngineSupervisor":
        """Start the engine. Raises InputError if it cannot, however many `restarts` there are.

        `on_restart` is called whenever it runs again.
        """
        options = {"engine": engine, "watch": watch, "limits": limits, "arguments": arguments}
        supervisor = cls(config, restarts, options, on_restart)
        supervisor._client = await EngineClient.start(config, **options)
        supervisor._task = asyncio.create_task(supervisor._supervise())
        return supervisor

    @property
    def max_model_len(self) -> int:
        return self._client.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._client.vocab_size

    @property
    def is_alive(self) -> bool:
        """Whether a request can run now."""
        return self._client.is_alive

    @property
    def is_restarting(self) -> bool:
        """Whether one can run later, though none can now."""
        return not self._client.is_alive and (self._is_starting or self._num_left > 0)

    async def wait_until_dead(self) -> None:
        """Returns when the engine is gone and will not be started again."""
        await self._given_up.wait()

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        watch: Watch = ignore,
        client: str = "",
        group: str = "",
        handling: Handling = DEFAULT,
    ) -> AsyncIterator[RequestEvent]:
        """Run one request on the engine that there is now, as EngineClient.generate does."""
        events = self._client.generate(
            request_id, prompt_token_ids, params, watch, client, group, handling
        )
        async with aclosing(events):
            async for event in events:
                yield event

    def reset_prefix_cache(self) -> None:
        """Let requests that come after this find no KV pages of earlier ones."""
        self._client.reset_prefix_cache()

    async def profile(self, config: ProfilerConfig | None) -> str:
        """Record steps, or end that with None. Returns when it is done: empty, or why not."""
        return await self._client.profile(config)

    async def load_adapter(self, lora: LoRARequest) -> str:
        """As EngineClient does. A new engine reads what a request names when it first does."""
        return await self._client.load_adapter(lora)

    def unload_adapter(self, name: str) -> None:
        """Let the engine forget an adapter. Requests that have it keep it."""
        self._client.unload_adapter(name)

    async def close(self) -> None:
        """End the engine and start none again."""
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
        logger.warning("The engine is started again; %d more times are left", self._num_left)
        try:
            await asyncio.sleep(PAUSE_SECONDS)
            self._client = await EngineClient.start(self._config, **self._options)
            if self._on_restart is not None:
                self._on_restart()
        except (InputError, OSError) as error:
            logger.error("The engine could not be started again: %s", error)
        finally:
            self._is_starting = False
