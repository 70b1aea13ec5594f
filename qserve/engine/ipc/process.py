"""The engine process: `python -m qserve.engine.ipc.process --fd N`, N a connected Unix socket.

The client starts the process, which ends when the client is gone. One thread reads messages into a
queue, another sends a heartbeat every second; only the main thread uses the engine. An error in any
thread ends the process.
"""

import argparse
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from formats.errors import InputError
from qserve.engine import cpu_threads
from qserve.engine.control.command_queue import CommandQueue, state_of
from qserve.engine.control.commands import Outcome
from qserve.engine.distributed.executors import WaitingRanks
from qserve.engine.ipc import messages
from qserve.engine.ipc.adapter_loads import AdapterLoads, AdapterRead
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
    UnloadAdapter,
)
from qserve.engine.ipc.waiting import ENGINE
from qserve.engine.start_phases import phase
from qserve.engine.token_event import TokenEvent
from qserve.errors import BusyError
from qserve.processes import logs
from qserve.processes.frames import MAX_PAYLOAD_BYTES
from qserve.processes.log_limit import limit_logging

EXIT_GRACE = 2.0  # seconds for a step or a load to finish after the client is gone
BEAT_SECONDS = 1.0
# Maximum number of messages between two steps. An Add with 1,024 stop tokens costs 0.2 ms.
MESSAGES_PER_STEP = 64
TOO_LARGE = (
    f"its vectors or log probabilities take more than {MAX_PAYLOAD_BYTES >> 20} MiB; request fewer"
    " tokens or alternatives"
)
# seconds to wait for the socket's lock before sending an error; a stuck thread may hold the lock
LAST_WORD_SECONDS = 1.0

logger = logging.getLogger(__name__)


class ClientGone(BaseException):
    """The client has closed the connection, or the process was asked to end.

    This is a BaseException, so that handlers for errors of requests and commands do not catch it.
    """


class Inbox:
    """Queue of messages for the main thread, in order of arrival; aborts go ahead of all others.

    Without that priority, if a client sent many requests and disconnected, the engine would work
    for it until its last request was added. An abort removes its Add message if that is still here.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._aborts: deque[Abort] = deque()
        self._others: deque[object] = deque()
        self._adds: dict[str, Add] = {}  # the Add messages in _others, by request id
        self._dropped: set[int] = set()  # id() of Add messages in _others that were aborted

    def __len__(self) -> int:
        return len(self._aborts) + len(self._others) - len(self._dropped)

    def put(self, message: object) -> None:
        with self._changed:
            if not isinstance(message, Abort):
                self._others.append(message)
                if isinstance(message, Add):
                    self._adds[message.request_id] = message
            elif (add := self._adds.pop(message.request_id, None)) is not None:
                self._dropped.add(id(add))
            else:
                self._aborts.append(message)
            self._changed.notify()

    def wait(self, seconds: float | None) -> bool:
        """Wait up to `seconds` for a message; None: no limit. Returns False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._aborts or self._others, seconds)

    def get(self) -> object:
        """Wait for the next message, remove it from the queue and return it."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._aborts or self._others)
                if self._aborts:
                    return self._aborts.popleft()
                message = self._others.popleft()
                if id(message) in self._dropped:
                    self._dropped.discard(id(message))
                    continue
                if isinstance(message, Add) and self._adds.get(message.request_id) is message:
                    del self._adds[message.request_id]
                return message

    @property
    def has_aborts(self) -> bool:
        return bool(self._aborts)


class _ClientConnection:
    """The socket to the client. Several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self.busy_since: float | None = None  # start of the main thread's current work

    def send(self, message: FromEngine) -> None:
        data = messages.encode(message)
        with self._lock:
            self.connection.sendall(data)

    def send_last(self, message: EngineDied | StartFailed) -> None:
        """Send the final message, unless the socket is blocked. Nothing is sent afterwards."""
        if not self._lock.acquire(timeout=LAST_WORD_SECONDS):
            return
        try:
            self.connection.settimeout(LAST_WORD_SECONDS)
            self.connection.sendall(messages.encode(message))
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            logger.warning("The client disconnected before this could be sent: %s", message)


def main(argv: list[str] | None = None) -> int:
    """Load the model, send Ready and run until the client is gone. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="qserve.engine.ipc.process")
    parser.add_argument("--fd", type=int, required=True, help="the connected socket")
    parser.add_argument("--engine", default=ENGINE, help=argparse.SUPPRESS)  # for tests
    logs.add_arguments(parser)
    arguments = parser.parse_args(argv)
    text = logs.named(arguments.log_name)
    logs.configure(arguments.log_level, arguments.log_format, text)
    limit_logging()
    client = _ClientConnection(socket.socket(fileno=arguments.fd))
    inbox = Inbox()
    _start_thread(_read, client, inbox)
    try:
        engine = _start(arguments.engine, client, inbox)
        if engine is None:
            return 1
        _start_thread(_send_heartbeats, client)
        loads = AdapterLoads(lambda work: _start_thread(lambda _: work(), client), inbox.put)
        commands = CommandQueue(engine)
        gc.freeze()  # loaded objects stay alive, so full collections need not scan them
        while True:
            _take_messages(engine, client, inbox, loads, commands)
            client.busy_since = time.perf_counter()
            _send(client, engine.step(), engine)
            _advance(engine, client, commands)
    except (ClientGone, ConnectionError):
        return 0
    except Exception as error:
        _fail(client, error)
        return 1
    finally:
        gc.unfreeze()  # otherwise nanobind reports frozen objects as leaked at exit, in forty lines


def _start_thread(work: Callable[..., None], client: _ClientConnection, *arguments: object) -> None:
    """Run `work` in a thread. An error in it ends the process.

    Otherwise other threads would wait for the thread's results, and the server for an answer.
    """

    def run() -> None:
        try:
            work(client, *arguments)
        except BaseException as error:
            _die(client, error)

    threading.Thread(target=run, daemon=True).start()


def _read(client: _ClientConnection, inbox: Inbox) -> None:
    """Put the client's messages into the inbox, and None when the client is gone."""
    try:
        while True:
            inbox.put(messages.receive(client.connection, messages.ToEngine))
    except (EOFError, OSError):
        pass
    except messages.MessageError:
        logger.exception("The client sent an invalid message")
    inbox.put(None)
    time.sleep(EXIT_GRACE)
    # The main thread is still in a load or a step and holds the GPU.
    os._exit(1)


def _send_heartbeats(client: _ClientConnection) -> None:
    """Send a heartbeat every second, with the duration of the current step so far."""
    try:
        while True:
            since = client.busy_since
            busy = 0.0 if since is None else time.perf_counter() - since
            client.send(Heartbeat(busy_seconds=busy))
            time.sleep(BEAT_SECONDS)
    except OSError:
        return  # the reader thread notices the lost connection too


def _leave(number: int, frame: object) -> None:
    """Handle a signal as if the client were gone. Later signals must not interrupt the exit."""
    signal.signal(number, signal.SIG_IGN)
    raise ClientGone


def _start(engine_path: str, client: _ClientConnection, inbox: Inbox) -> object | None:
    """Create the engine that the first message describes. On an error, report it, return None."""
    # The client may have started this process before it knows the model.
    importing = ThreadPoolExecutor(1).submit(_import_engine, engine_path)
    message = inbox.get()
    if not isinstance(message, Start):
        raise ClientGone
    if message.config.record_expert_loads is not None:
        signal.signal(signal.SIGTERM, _leave)  # the file is written by a normal exit
    ranks = None
    try:
        num_cores = len(os.sched_getaffinity(0))
        config = cpu_threads.with_server_core(message.config, num_cores=num_cores)
        ranks = WaitingRanks.of(config)  # the ranks import modules while this process does
        make = importing.result()
        engine = make(config) if ranks is None else make(config, ranks)
        if message.check and config.load_format != "dummy":
            # Imported here because it loads torch, which the engine has loaded by now.
            from qserve.engine.start_check import check_start

            with phase("Start-up check"):
                check_start(engine, config.model)
    except InputError as error:
        failure = StartFailed(subject=error.subject, problem=error.problem, remedy=error.remedy)
    except Exception as error:
        logger.exception("The engine failed to start")
        failure = StartFailed(subject=message.config.model, problem=_one_line(error))
    else:
        watch_ranks = getattr(engine, "watch_ranks", None)  # test engines have no ranks
        if watch_ranks is not None:
            watch_ranks(lambda error: _die(client, error))
        client.send(
            Ready(
                max_model_len=engine.max_model_len,
                vocab_size=engine.vocab_size,
                report=engine.report(),
                state=state_of(engine),
                **_media_facts(engine),
            )
        )
        return engine
    if ranks is not None:
        ranks.close()
    client.send_last(failure)
    return None


def _import_engine(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    with phase("Importing the engine"):
        return getattr(importlib.import_module(module), name)


def _media_facts(engine: object) -> dict[str, Any]:
    """Return the fields of Ready about media. Empty for test engines, which have no model."""
    model = getattr(engine, "model_config", None)
    if model is None:
        return {}
    return {"media_kinds": tuple(sorted(model.media_kinds)), "no_vision": model.no_vision}


def _take_messages(
    engine: object,
    client: _ClientConnection,
    inbox: Inbox,
    loads: AdapterLoads,
    commands: CommandQueue | None = None,
) -> None:
    """Handle the messages that have arrived. Waits for a message if there is nothing to compute.

    Aborts do not count towards MESSAGES_PER_STEP: each abort makes the next steps shorter.
    """
    num_taken = 0
    while (
        inbox.has_aborts or not engine.has_work() or (len(inbox) and num_taken < MESSAGES_PER_STEP)
    ):
        num_taken += not inbox.has_aborts
        while not len(inbox) and engine.use_idle_time():
            pass
        client.busy_since = None
        if not inbox.wait(getattr(engine, "idle_seconds", None)):  # test engines have none
            return  # the next step checks deadlines
        message = inbox.get()
        client.busy_since = time.perf_counter()
        if isinstance(message, Add):
            _add(engine, client, message)
        elif isinstance(message, Abort):
            engine.abort(message.request_id)
            if not engine.has_work():
                _send(client, [], engine)  # no step follows that would report the new state
        elif isinstance(message, StopWaiting):
            engine.stop_waiting(message.request_id)
        elif isinstance(message, ResetPrefixCache):
            engine.reset_prefix_cache()
            logger.info("The prefix cache was emptied by an operator")
        elif isinstance(message, Profile):
            client.send(_answer(message.number, lambda command=message: _profile(engine, command)))
        elif isinstance(message, Operate):
            commands.add(message.number, message.command)
            _advance(engine, client, commands)
        elif isinstance(message, LoadAdapter):
            loads.add(message, engine.adapters.read)
        elif isinstance(message, CancelLoad):
            loads.cancel(message.number)
        elif isinstance(message, AdapterRead):
            client.send(_put(engine, message))
        elif isinstance(message, UnloadAdapter):
            engine.adapters.unload(message.name)
        else:
            raise ClientGone


def _add(engine: object, client: _ClientConnection, message: Add) -> None:
    """Queue a request. An error ends only this request."""
    try:
        engine.add_request(
            message.request_id,
            message.prompt_token_ids,
            message.params,
            message.sent,
            client=message.client,
            group=message.group,
            options=message.options,
        )
    except InputError as error:
        client.send(
            Refused(
                request_id=message.request_id,
                subject=error.subject,
                problem=error.problem,
                remedy=error.remedy,
                is_temporary=isinstance(error, BusyError),
            )
        )
    except Exception as error:
        logger.exception("Request %s could not be queued", message.request_id)
        engine.abort(message.request_id)  # it may have been queued partially
        _send(client, [TokenEvent.failure(message.request_id, _one_line(error))], engine)


def _advance(engine: object, client: _ClientConnection, commands: CommandQueue) -> None:
    """Run commands until one must wait, and answer the finished ones."""
    finished = commands.advance()
    if finished:
        _send(client, [], engine)  # send a report, since no step may follow
    for number, outcome, error in finished:
        problem = "" if error is None else _problem_of(error)
        client.send(Done(number=number, problem=problem, outcome=outcome))


def _problem_of(error: Exception) -> str:
    """Return the error message of a failed command."""
    if isinstance(error, InputError | OSError):
        return str(error)
    logger.error("A command to the engine failed", exc_info=error)
    return _one_line(error)


def _answer(number: int, work: Callable[[], None]) -> Done:
    """Run a command. If it fails, the answer holds the error, and nothing else ends."""
    try:
        work()
    except Exception as error:
        return Done(number=number, problem=_problem_of(error))
    return Done(number=number)


def _put(engine: object, read: AdapterRead) -> Done:
    """Install an adapter that has been read. Returns the answer, with an error if there is one."""
    number, lora = read.command.number, read.command.lora
    if read.problem:
        return Done(number=number, problem=read.problem)
    put = engine.adapters.put
    answer = _answer(
        number, lambda: put(lora.lora_name, lora.lora_path, read.packed, lora.lora_int_id)
    )
    if answer.problem:
        return answer
    return Done(number=number, outcome=Outcome(state=state_of(engine)))


def _profile(engine: object, message: Profile) -> None:
    if message.config is None:
        engine.profiler.stop()
    else:
        engine.profiler.start(message.config)


def _send(client: _ClientConnection, events: list[TokenEvent], engine: object) -> None:
    """Send the events of a step. End a request whose event exceeds the message limit."""
    report = engine.report()
    try:
        client.send(Events(events=events, report=report))
        return
    except messages.MessageError:
        client.send(Events(events=[], report=report))
    for event in events:
        try:
            client.send(Events(events=[event], report=engine.report()))
        except messages.MessageError:
            engine.abort(event.request_id)
            event = TokenEvent.refusal(event.request_id, TOO_LARGE)
            client.send(Events(events=[event], report=engine.report()))


def _fail(client: _ClientConnection, error: BaseException) -> None:
    """Report the error that ends the engine to the log and to the client."""
    try:
        logger.error("The engine failed", exc_info=error)
    finally:  # logging may fail if memory is short
        client.send_last(EngineDied(message=_one_line(error)))


def _die(client: _ClientConnection, error: BaseException) -> None:
    """End the process from a thread. The main thread may be stuck in a wait for a dead rank."""
    try:
        _fail(client, error)
    finally:
        os._exit(1)


def _one_line(error: BaseException) -> str:
    """Return an error's type and first line, without a traceback, for the client."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
