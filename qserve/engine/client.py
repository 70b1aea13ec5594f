"""EngineClient: the server's end of the engine process. Runs on one asyncio loop; owns no GPU.

Knows tokens and events, no text and no HTTP.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from formats.errors import InputError
from qserve.child_process import start_child
from qserve.config import EngineConfig
from qserve.engine import messages
from qserve.engine.messages import (
    Abort,
    Add,
    Beat,
    Done,
    EngineDied,
    Events,
    FromEngine,
    LoadAdapter,
    Profile,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    StartFailed,
    ToEngine,
    UnloadAdapter,
)
from qserve.engine.process import ENGINE
from qserve.engine.report import EngineReport
from qserve.engine.request import RequestEvent, TokenLogprobs
from qserve.handling import DEFAULT, Handling
from qserve.lora.request import LoRARequest
from qserve.profile.profiler_config import ProfilerConfig
from qserve.sampling_params import SamplingParams

EXIT_TIMEOUT = 10.0  # seconds between asking the process to end and killing it
CLOSED = "the engine was closed"
WATCH_SECONDS = 1.0  # between two looks at whether it still answers

logger = logging.getLogger(__name__)


# Called with each event of a request, and with each report of the engine, as soon as it arrives.
Watch = Callable[[RequestEvent], None]
WatchEngine = Callable[[EngineReport], None]


def ignore(arrived: RequestEvent | EngineReport) -> None:
    """A watch that sees nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When an engine counts as dead, in seconds."""

    silence: float = 60.0  # without any message; it sends one every second
    step: float = 600.0  # that one step takes


class RefusedError(InputError):
    """The engine says that a request can never run."""


class _Output:
    """The events of one request that nobody has taken yet, merged into one.

    However slowly they are taken, this holds at most the tokens of one output.
    """

    def __init__(self, watch: Watch = ignore) -> None:
        self._watch = watch
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._last: RequestEvent | None = None
        self._refusal: RefusedError | None = None
        self._changed = asyncio.Event()

    def put(self, event: RequestEvent) -> None:
        if self._last is not None and self._last.finish_reason is not None:
            return
        self._watch(event)
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        self._last = event
        self._changed.set()

    def refuse(self, refusal: RefusedError) -> None:
        self._refusal = refusal
        self._changed.set()

    async def take(self) -> RequestEvent:
        await self._changed.wait()
        self._changed.clear()
        if self._refusal is not None:
            raise self._refusal
        last, token_ids, self._token_ids = self._last, tuple(self._token_ids), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return RequestEvent(
            request_id=last.request_id,
            token_ids=token_ids,
            finish_reason=last.finish_reason,
            stop_token=last.stop_token,
            ended_by_token=last.ended_by_token,
            error=last.error,
            logprobs=logprobs,
            num_cached=last.num_cached,
            prompt_logprobs=prompt_logprobs,
            is_asked_for=last.is_asked_for,
            pooled=last.pooled,
            beams=last.beams,
            num_accepted=last.num_accepted,
            num_rejected=last.num_rejected,
        )


class EngineClient:
    """A running engine process. Made by `EngineClient.start`, ended by `close`."""

    max_model_len: int
    vocab_size: int

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        watch: WatchEngine,
        limits: Limits,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._watch = watch
        self._limits = limits
        self._heard = True  # a message has come since the last look
        self._busy_seconds = 0.0  # that the engine's present step has taken
        self._adding = asyncio.Lock()
        self._num_asked = 0
        self._answers: dict[int, asyncio.Future[str]] = {}  # by the questions' numbers
        self._outputs: dict[str, _Output] = {}
        self._tasks: list[asyncio.Task] = []
        self._dead = asyncio.Event()
        self._cause_of_death = ""

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        engine: str = ENGINE,
        watch: WatchEngine = ignore,
        limits: Limits | None = None,
        arguments: Sequence[str] = (),
    ) -> "EngineClient":
        """Start the process and wait for its model to load. Raises InputError if it cannot.

        `watch` gets what the engine tells of itself; the last report, of a dead one, is all zero.
        `arguments` are further ones of the process.
        """
        process, reader, writer = await start_child(
            "qserve.engine.process", f"--engine={engine}", *arguments
        )
        client = cls(process, reader, writer, watch, limits or Limits())
        try:
            writer.write(messages.encode(Start(config=config)))
            await client._wait_until_ready()
        except BaseException:
            await client.close()
            raise
        client._tasks = [
            asyncio.create_task(client._read()),
            asyncio.create_task(client._watch_over()),
        ]
        return client

    @property
    def is_alive(self) -> bool:
        return not self._dead.is_set()

    async def wait_until_dead(self) -> str:
        """Returns the cause when the engine is gone, whatever the reason."""
        await self._dead.wait()
        return self._cause_of_death

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
        """Run one request; the last of its events has a finish_reason, "error" if the engine dies.

        Events that are taken slowly come merged; `watch` sees each as it arrives. Closing the
        generator early aborts the request. `client` says whose it is, and `group` of which API
        request it is an output, for turns that are fair. Raises RefusedError when the engine can
        never run it.
        """
        if request_id in self._outputs:
            raise ValueError(f"request id {request_id!r} is in use")
        if not self.is_alive:
            yield self._death_event(request_id)
            return
        output = self._outputs[request_id] = _Output(watch)
        try:
            # The engine knows no text: megabytes of stop strings would go with each of n outputs.
            params = replace(params, stop=()) if params.stop else params
            add = Add(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                params=params,
                sent=time.perf_counter(),
                client=client,
                group=group,
                handling=handling,
            )
            await self._send(add)
            finished = False
            while not finished:
                event = await output.take()
                finished = event.finish_reason is not None
                if finished:
                    self._outputs.pop(request_id, None)
                yield event
        except RefusedError:
            self._outputs.pop(request_id, None)
            raise
        finally:
            self.abort(request_id)

    async def _send(self, add: Add) -> None:
        # One in each turn of the loop: 128 outputs of a long prompt take as many milliseconds.
        async with self._adding:
            self._writer.write(messages.encode(add))
            # A lost connection is reported by the reader, to all requests at once.
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
            await asyncio.sleep(0)

    def abort(self, request_id: str) -> None:
        """Drop a request that has not finished; an unknown id is ignored."""
        if self._outputs.pop(request_id, None) is not None and self.is_alive:
            self._writer.write(messages.encode(Abort(request_id=request_id)))

    def reset_prefix_cache(self) -> None:
        """Let requests that come after this find no KV pages of earlier ones."""
        if self.is_alive:
            self._writer.write(messages.encode(ResetPrefixCache()))

    async def profile(self, config: ProfilerConfig | None) -> str:
        """Record steps, or end that with None. Returns when it is done: empty, or why not."""
        return await self._ask(lambda number: Profile(number=number, config=config))

    async def load_adapter(self, lora: LoRARequest) -> str:
        """Have the engine read an adapter. Returns when requests can have it: empty, or why not."""
        return await self._ask(lambda number: LoadAdapter(number=number, lora=lora))

    async def _ask(self, question: Callable[[int], ToEngine]) -> str:
        """The engine's answer. Who stops waiting for one does not leave it to the next."""
        if not self.is_alive:
            return self._cause_of_death
        self._num_asked += 1
        number = self._num_asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(messages.encode(question(number)))
            return await answer
        finally:
            del self._answers[number]

    def unload_adapter(self, name: str) -> None:
        """Let the engine forget an adapter. Requests that have it keep it."""
        if self.is_alive:
            self._writer.write(messages.encode(UnloadAdapter(name=name)))

    async def close(self) -> None:
        """End the process: it leaves when the socket closes; else it is told to, then killed."""
        for task in self._tasks:
            task.cancel()
        self._die(CLOSED)
        self._writer.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), EXIT_TIMEOUT)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _wait_until_ready(self) -> None:
        try:
            message = await messages.read(self._reader, FromEngine)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await self._process.wait()
            remedy = "its own messages are above"
            if code == -signal.SIGKILL:
                remedy = (
                    "the system kills what needs more memory than there is; on a CPU --dtype"
                    " bfloat16 needs least, and --cpu-kv-cache-memory can be lower"
                )
            raise InputError(
                "engine process", f"ended with exit code {code} while it was starting", remedy
            ) from error
        if isinstance(message, StartFailed):
            raise InputError(message.subject, message.problem, message.remedy)
        if not isinstance(message, Ready):
            raise messages.MessageError(f"expected Ready, found {type(message).__name__}")
        self.max_model_len, self.vocab_size = message.max_model_len, message.vocab_size
        self._watch(message.report)

    async def _read(self) -> None:
        cause = ""
        try:
            while not cause:
                message = await messages.read(self._reader, FromEngine)
                self._heard = True
                if isinstance(message, Events):
                    self._watch(message.report)
                    self._busy_seconds = 0.0
                    for event in message.events:
                        if event.request_id in self._outputs:
                            self._outputs[event.request_id].put(event)
                elif isinstance(message, Refused) and message.request_id in self._outputs:
                    refusal = RefusedError(message.subject, message.problem, message.remedy)
                    self._outputs[message.request_id].refuse(refusal)
                elif isinstance(message, Done):
                    _settle(self._answers.get(message.number), message.problem)
                elif isinstance(message, Beat):
                    self._busy_seconds = message.busy_seconds
                elif isinstance(message, EngineDied):
                    cause = message.message
        except (asyncio.IncompleteReadError, ConnectionError):
            cause = f"the engine process ended with exit code {await self._process.wait()}"
        except Exception as error:
            # Whatever it is: nobody reads the engine's answers any more.
            logger.exception("The engine's messages cannot be read")
            cause = f"{type(error).__name__}: {error}"
        self._die(cause)

    async def _watch_over(self) -> None:
        """Kill an engine that gives no sign of life, or whose step does not end.

        Looks are counted, not seconds: when this process was stopped, the engine is not to blame.
        """
        limits, num_silent, cause = self._limits, 0, ""
        while not cause:
            await asyncio.sleep(WATCH_SECONDS)
            num_silent = 0 if self._heard else num_silent + 1
            self._heard = False
            if num_silent * WATCH_SECONDS >= limits.silence:
                cause = f"the engine process gave no sign of life for {limits.silence:g} s"
            elif self._busy_seconds > limits.step:
                cause = f"one step of the engine took more than {limits.step:g} s"
        self._die(cause)
        # It would not see a request to end, or a closed socket: it is stopped, or stuck.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _die(self, cause: str) -> None:
        if not self.is_alive:
            return
        if cause != CLOSED:
            logger.error("The engine died: %s", cause)
        self._cause_of_death = cause
        self._dead.set()
        self._watch(EngineReport())
        for answer in self._answers.values():
            _settle(answer, cause)
        for request_id, output in self._outputs.items():
            output.put(self._death_event(request_id))

    def _death_event(self, request_id: str) -> RequestEvent:
        return RequestEvent.failure(request_id, self._cause_of_death)


def _settle(future: asyncio.Future[str] | None, problem: str) -> None:
    """Give the answer to who waits for it, if anybody does."""
    if future is not None and not future.done():
        future.set_result(problem)
