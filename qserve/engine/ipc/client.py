"""EngineClient: starts the engine process and exchanges messages with it.

The client runs on one asyncio loop and owns no GPU. It sends token ids and receives events.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.control.commands import AnyCommand, EngineState, Outcome
from qserve.engine.ipc import messages
from qserve.engine.ipc.messages import (
    Abort,
    Add,
    CancelLoad,
    Done,
    EngineDied,
    Events,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    Operate,
    Profile,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    StartFailed,
    StopWaiting,
    ToEngine,
    UnloadAdapter,
)
from qserve.engine.ipc.waiting import ENGINE, MODULE, WaitingEngine
from qserve.engine.report import EngineReport
from qserve.engine.token_event import TokenEvent, TokenLogprobs
from qserve.errors import BusyError
from qserve.lora.request import LoRARequest
from qserve.params.request_options import DEFAULT, RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.processes.child_process import ChildProcess, start_child
from qserve.profile.profiler_config import ProfilerConfig

EXIT_TIMEOUT = 10.0  # seconds between asking the process to exit and killing it
CLOSED = "the engine was closed"
ENGINE_NAME = "The engine"  # how log lines call the only engine of a server
WATCH_SECONDS = 1.0  # interval of the liveness check

logger = logging.getLogger(__name__)


# Called with each event of a request, or with each report of the engine, as soon as it arrives.
Watch = Callable[[TokenEvent], None]
WatchEngine = Callable[[EngineReport], None]


def ignore(arrived: TokenEvent | EngineReport) -> None:
    """Do nothing. This is the default `watch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Timeouts in seconds after which an engine counts as dead."""

    silence: float = 60.0  # without any message; the engine sends one every second
    step: float = 600.0  # for one step


class RefusedError(InputError):
    """The engine refused a request because the request can never run."""


class _Output:
    """The unread events of one request, merged into one event.

    If the consumer is slow, this holds at most the tokens of one output.
    """

    def __init__(self, watch: Watch = ignore) -> None:
        self._watch = watch
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._last: TokenEvent | None = None
        self._refusal: RefusedError | BusyError | None = None
        self._changed = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        if self._last is not None and self._last.finish_reason is not None:
            return
        self._watch(event)
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        self._last = event
        self._changed.set()

    def refuse(self, refusal: RefusedError | BusyError) -> None:
        self._refusal = refusal
        self._changed.set()

    async def take(self) -> TokenEvent:
        await self._changed.wait()
        self._changed.clear()
        if self._refusal is not None:
            raise self._refusal
        last, token_ids, self._token_ids = self._last, tuple(self._token_ids), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return last._replace(
            token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )


class EngineClient:
    """A running engine process. `EngineClient.start` creates it, `close` ends it."""

    max_model_len: int
    vocab_size: int
    media_kinds: tuple[str, ...]
    no_vision: str

    def __init__(
        self,
        process: ChildProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        watch: WatchEngine,
        limits: Limits,
        name: str,
    ) -> None:
        self._name = name
        self._process, self._reader, self._writer = process, reader, writer
        self._watch = watch
        self._limits = limits
        self._heard = True  # True if a message has arrived since the last check
        self._busy_seconds = 0.0  # duration of the engine's current step so far
        self._adding = asyncio.Lock()
        self._num_commands = 0
        self._answers: dict[int, asyncio.Future[Done]] = {}  # number of a command -> its answer
        self.state = EngineState()  # state after the last command
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
        name: str = ENGINE_NAME,
        arguments: Sequence[str] = (),
        check: bool = True,
        waiting: WaitingEngine | None = None,
    ) -> "EngineClient":
        """Start the process and wait for its model to load. Raises InputError on failure.

        `watch` gets the engine's reports; when the engine dies it gets a last report of zeros.
        `name`: how log lines call the engine, such as "Engine 1". `arguments`: more command-line
        arguments for the process. `check`: refuse a model whose logits differ from those stored in
        its folder. `waiting`: a process that runs already; it has its engine and arguments.
        """
        if waiting is not None:
            process, reader, writer = await waiting.take()
        else:
            process, reader, writer = await start_child(MODULE, f"--engine={engine}", *arguments)
        client = cls(process, reader, writer, watch, limits or Limits(), name)
        try:
            writer.write(messages.encode(Start(config=config, check=check)))
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
        """Wait until the engine is dead or closed, and return the cause."""
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
        options: RequestOptions = DEFAULT,
    ) -> AsyncIterator[TokenEvent]:
        """Run one request. The last event has a finish_reason; it is "error" if the engine dies.

        A slow consumer gets merged events; `watch` gets each event as it arrives. Closing the
        generator early aborts the request. Fair scheduling uses `client`, the owner of the request,
        and `group`, the API request that this output belongs to. Raises RefusedError if the engine
        can never run the request, BusyError if it cannot run the request now.
        """
        if request_id in self._outputs:
            raise ValueError(f"request id {request_id!r} is in use")
        if not self.is_alive:
            yield self._death_event(request_id)
            return
        output = self._outputs[request_id] = _Output(watch)
        try:
            # The engine does not use stop strings. They may be megabytes, sent once per output.
            params = replace(params, stop=()) if params.stop else params
            add = Add(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                params=params,
                sent=time.perf_counter(),
                client=client,
                group=group,
                options=options,
            )
            await self._send(add)
            finished = False
            while not finished:
                event = await output.take()
                finished = event.finish_reason is not None
                if finished:
                    self._outputs.pop(request_id, None)
                yield event
        except (RefusedError, BusyError):
            self._outputs.pop(request_id, None)
            raise
        finally:
            self.abort(request_id)

    async def _send(self, add: Add) -> None:
        # One message per turn of the event loop: encoding a long prompt takes about 1 ms, and a
        # request may have 128 outputs.
        async with self._adding:
            self._writer.write(messages.encode(add))
            # The reader reports a lost connection to all requests.
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
            await asyncio.sleep(0)

    def abort(self, request_id: str) -> None:
        """Abort a request that has not finished. An unknown id is ignored."""
        if self._outputs.pop(request_id, None) is not None and self.is_alive:
            self._writer.write(messages.encode(Abort(request_id=request_id)))

    async def stop_waiting(self, request_id: str) -> None:
        """Stop waiting for KV pages of a request: the other engine has finished or failed."""
        async with self._adding:  # so that this message follows the request itself
            if request_id in self._outputs and self.is_alive:
                self._writer.write(messages.encode(StopWaiting(request_id=request_id)))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: later requests find no KV pages of earlier ones."""
        if self.is_alive:
            self._writer.write(messages.encode(ResetPrefixCache()))

    async def profile(self, config: ProfilerConfig | None) -> str:
        """Start recording steps; None stops it. Returns an error message, or ""."""
        done = await self._command(lambda number: Profile(number=number, config=config))
        return done.problem

    async def load_adapter(self, lora: LoRARequest) -> str:
        """Load an adapter. Returns "" once requests can use it, or an error message."""
        done = await self._command(
            lambda number: LoadAdapter(number=number, lora=lora),
            lambda number: CancelLoad(number=number),
        )
        return done.problem

    async def operate(self, command: AnyCommand) -> tuple[Outcome, str]:
        """Run an operator's command. Returns the outcome, and an error message or ""."""
        done = await self._command(lambda number: Operate(number=number, command=command))
        return done.outcome or Outcome(state=self.state), done.problem

    async def _command(
        self,
        make: Callable[[int], ToEngine],
        cancel: Callable[[int], ToEngine] | None = None,
    ) -> Done:
        """Send a command and return the engine's answer.

        `make` creates the message with a given number. `cancel` creates the message that is sent if
        the caller stops waiting.
        """
        if not self.is_alive:
            return Done(number=0, problem=self._cause_of_death)
        self._num_commands += 1
        number = self._num_commands
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(messages.encode(make(number)))
            return await answer
        except asyncio.CancelledError:
            if cancel is not None and self.is_alive:
                self._writer.write(messages.encode(cancel(number)))
            raise
        finally:
            del self._answers[number]

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that already use it keep it."""
        if self.is_alive:
            self._writer.write(messages.encode(UnloadAdapter(name=name)))

    async def close(self) -> None:
        """End the process: close the socket, send SIGTERM, and kill it after EXIT_TIMEOUT."""
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
            remedy = "see its messages above"
            if code == -signal.SIGKILL:
                remedy = (
                    "the system probably killed it for using too much memory; on a CPU use"
                    " --dtype bfloat16 or a smaller --cpu-kv-cache-memory"
                )
            raise InputError(
                "engine process", f"ended with exit code {code} while it was starting", remedy
            ) from error
        if isinstance(message, StartFailed):
            raise InputError(message.subject, message.problem, message.remedy)
        if not isinstance(message, Ready):
            raise messages.MessageError(f"expected Ready, found {type(message).__name__}")
        self.max_model_len, self.vocab_size = message.max_model_len, message.vocab_size
        self.media_kinds, self.no_vision = message.media_kinds, message.no_vision
        self.state = message.state
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
                    kind = BusyError if message.is_temporary else RefusedError
                    refusal = kind(message.subject, message.problem, message.remedy)
                    self._outputs[message.request_id].refuse(refusal)
                elif isinstance(message, Done):
                    if message.outcome is not None:
                        self.state = message.outcome.state
                    _settle(self._answers.get(message.number), message)
                elif isinstance(message, Heartbeat):
                    self._busy_seconds = message.busy_seconds
                elif isinstance(message, EngineDied):
                    cause = message.message
        except (asyncio.IncompleteReadError, ConnectionError):
            cause = f"the engine process ended with exit code {await self._process.wait()}"
        except Exception as error:
            # After any error nothing reads the engine's messages, so the engine counts as dead.
            logger.exception("Cannot read the engine's messages")
            cause = f"{type(error).__name__}: {error}"
        self._die(cause)

    async def _watch_over(self) -> None:
        """Kill the engine if it sends no message or a step does not end.

        The loop counts checks instead of seconds, so that time during which this process itself was
        stopped does not count.
        """
        limits, num_silent, cause = self._limits, 0, ""
        while not cause:
            await asyncio.sleep(WATCH_SECONDS)
            num_silent = 0 if self._heard else num_silent + 1
            self._heard = False
            if num_silent * WATCH_SECONDS >= limits.silence:
                cause = f"the engine process sent no message for {limits.silence:g} s"
            elif self._busy_seconds > limits.step:
                cause = f"one step of the engine took more than {limits.step:g} s"
        self._die(cause)
        # A stopped or stuck process would not react to SIGTERM or a closed socket.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _die(self, cause: str) -> None:
        if not self.is_alive:
            return
        if cause != CLOSED:
            logger.error("%s died: %s", self._name, cause)
        self._cause_of_death = cause
        self._dead.set()
        self._watch(EngineReport())
        for number, answer in self._answers.items():
            _settle(answer, Done(number=number, problem=cause))
        for request_id, output in self._outputs.items():
            output.put(self._death_event(request_id))

    def _death_event(self, request_id: str) -> TokenEvent:
        event = TokenEvent.failure(request_id, self._cause_of_death)
        return event._replace(has_lost_engine=True)


def _settle(future: asyncio.Future[Done] | None, done: Done) -> None:
    """Resolve the future if it is still pending."""
    if future is not None and not future.done():
        future.set_result(done)
