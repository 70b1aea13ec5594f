"""The engine process: `python -m qserve.engine.process --fd N`, N a connected Unix socket.

The client starts it and it ends when the client is gone. One thread reads messages into a queue,
one sends a sign of life every second; the main thread alone touches the engine. An error in any of
them ends the process. Knows no text and no HTTP.
"""

import argparse
import gc
import importlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from formats.errors import InputError
from qserve import logs
from qserve.engine import cpu_threads, messages
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
    UnloadAdapter,
)
from qserve.engine.request import RequestEvent
from qserve.engine.start_phases import phase
from qserve.log_limit import limit_logging

ENGINE = "qserve.engine.engine:Engine"
EXIT_GRACE = 2.0  # seconds that a step or a load may still run after the client is gone
BEAT_SECONDS = 1.0
# Taken between two steps while there is work: an addition with 1,024 stop tokens costs 0.2 ms.
MESSAGES_PER_STEP = 64
LAST_WORD_SECONDS = 1.0  # that an error waits for the line, which another thread may hold for good

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """There is nobody to work for any more."""


class _Line:
    """The socket to the client, which several threads write to."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self.busy_since: float | None = None  # when the main thread began what it does now

    def send(self, message: FromEngine) -> None:
        data = messages.encode(message)
        with self._lock:
            self.connection.sendall(data)

    def send_last(self, message: EngineDied | StartFailed) -> None:
        """Tell the client if that can be done soon; nothing is sent after it."""
        if not self._lock.acquire(timeout=LAST_WORD_SECONDS):
            return
        try:
            self.connection.settimeout(LAST_WORD_SECONDS)
            self.connection.sendall(messages.encode(message))
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            logger.warning("The client was gone before it could be told: %s", message)


def main(argv: list[str] | None = None) -> int:
    """Load, report, serve until the client is gone. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="qserve.engine.process")
    parser.add_argument("--fd", type=int, required=True, help="the connected socket")
    parser.add_argument("--engine", default=ENGINE, help=argparse.SUPPRESS)  # tests give their own
    logs.add_arguments(parser)
    arguments = parser.parse_args(argv)
    logs.configure(arguments.log_level, arguments.log_format)
    limit_logging()
    line = _Line(socket.socket(fileno=arguments.fd))
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    _start_thread(_read, line, inbox)
    try:
        engine = _start(arguments.engine, line, inbox)
        if engine is None:
            return 1
        _start_thread(_beat, line)
        gc.freeze()  # what is loaded stays; else every full collection looks at it
        while True:
            _take_messages(engine, line, inbox)
            line.busy_since = time.perf_counter()
            _send(line, engine.step(), engine)
    except (ClientGone, ConnectionError):
        return 0
    except Exception as error:
        _fail(line, error)
        return 1
    finally:
        gc.unfreeze()  # at the exit nanobind would call what is frozen leaked, in forty lines


def _start_thread(work: Callable[..., None], line: _Line, *arguments: object) -> None:
    """Run `work` in a thread whose error ends the process, as an error of the main thread does.

    The others would wait for what it did, and the server for an answer.
    """

    def run() -> None:
        try:
            work(line, *arguments)
        except BaseException as error:
            _die(line, error)

    threading.Thread(target=run, daemon=True).start()


def _read(line: _Line, inbox: queue.SimpleQueue) -> None:
    """Feed the queue; None means that the client is gone."""
    try:
        while True:
            inbox.put(messages.receive(line.connection, messages.ToEngine))
    except (EOFError, OSError):
        pass
    except messages.MessageError:
        logger.exception("The client sent something else than a message")
    inbox.put(None)
    time.sleep(EXIT_GRACE)
    # The main thread is in a load or a step that does not end, and it holds the GPU.
    os._exit(1)


def _beat(line: _Line) -> None:
    """Tell that the process runs, and for how long its present step has."""
    try:
        while True:
            since = line.busy_since
            busy = 0.0 if since is None else time.perf_counter() - since
            line.send(Beat(busy_seconds=busy))
            time.sleep(BEAT_SECONDS)
    except OSError:
        return  # the reader sees it too


def _start(engine_path: str, line: _Line, inbox: queue.SimpleQueue) -> object | None:
    """The engine that the first message asks for, or None after saying why there is none."""
    message = inbox.get()
    if not isinstance(message, Start):
        raise ClientGone
    try:
        module, _, name = engine_path.partition(":")
        num_cores = len(os.sched_getaffinity(0))
        config = cpu_threads.beside_a_server(message.config, num_cores=num_cores)
        with phase("Importing the engine"):
            make = getattr(importlib.import_module(module), name)
        engine = make(config)
    except InputError as error:
        failure = StartFailed(subject=error.subject, problem=error.problem, remedy=error.remedy)
    except Exception as error:
        logger.exception("The engine could not be started")
        failure = StartFailed(subject=message.config.model, problem=_one_line(error))
    else:
        watch_ranks = getattr(engine, "watch_ranks", None)  # engines of tests have no ranks
        if watch_ranks is not None:
            watch_ranks(lambda error: _die(line, error))
        line.send(
            Ready(
                max_model_len=engine.max_model_len,
                vocab_size=engine.vocab_size,
                report=engine.report(),
            )
        )
        return engine
    line.send_last(failure)
    return None


def _take_messages(engine: object, line: _Line, inbox: queue.SimpleQueue) -> None:
    """Handle messages that have come; wait for one when there is nothing to compute."""
    num_taken = 0
    while not (engine.has_work() and (inbox.empty() or num_taken >= MESSAGES_PER_STEP)):
        num_taken += 1
        while inbox.empty() and engine.use_idle_time():
            pass
        line.busy_since = None
        message = inbox.get()
        line.busy_since = time.perf_counter()
        if isinstance(message, Add):
            try:
                engine.add_request(
                    message.request_id,
                    message.prompt_token_ids,
                    message.params,
                    message.sent,
                    client=message.client,
                    group=message.group,
                    handling=message.handling,
                )
            except InputError as error:
                refusal = Refused(
                    request_id=message.request_id,
                    subject=error.subject,
                    problem=error.problem,
                    remedy=error.remedy,
                )
                line.send(refusal)
        elif isinstance(message, Abort):
            engine.abort(message.request_id)
            if not engine.has_work():
                _send(line, [], engine)  # no step will come to tell it
        elif isinstance(message, ResetPrefixCache):
            engine.reset_prefix_cache()
        elif isinstance(message, Profile):
            line.send(_profile(engine, message))
        elif isinstance(message, LoadAdapter):
            _start_thread(_read_adapter, line, engine, message, inbox)
        elif isinstance(message, _AdapterRead):
            if not message.problem:
                lora, packed = message.asked.lora, message.packed
                engine.adapters.put(lora.lora_name, lora.lora_path, packed, lora.lora_int_id)
            line.send(Done(number=message.asked.number, problem=message.problem))
        elif isinstance(message, UnloadAdapter):
            engine.adapters.unload(message.name)
        else:
            raise ClientGone


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdapterRead:
    """In the inbox: a thread has read an adapter, or knows why it cannot."""

    asked: LoadAdapter
    packed: object = None
    problem: str = ""


def _read_adapter(
    line: _Line, engine: object, asked: LoadAdapter, inbox: queue.SimpleQueue
) -> None:
    """Read an adapter while steps go on. The main thread takes it."""
    try:
        read = _AdapterRead(asked=asked, packed=engine.adapters.read(asked.lora.lora_path))
    except (InputError, OSError) as error:
        read = _AdapterRead(asked=asked, problem=str(error))
    inbox.put(read)


def _profile(engine: object, message: Profile) -> Done:
    try:
        if message.config is None:
            engine.profiler.stop()
        else:
            engine.profiler.start(message.config)
    except (InputError, OSError) as error:
        return Done(number=message.number, problem=str(error))
    return Done(number=message.number)


def _send(line: _Line, events: list[RequestEvent], engine: object) -> None:
    line.send(Events(events=events, report=engine.report()))


def _fail(line: _Line, error: BaseException) -> None:
    """Say why the engine ends, to the log and the client."""
    try:
        logger.error("The engine failed", exc_info=error)
    finally:  # where memory is short the log may fail
        line.send_last(EngineDied(message=_one_line(error)))


def _die(line: _Line, error: BaseException) -> None:
    """End the process from a thread: the main one waits for a rank that is gone, or for work."""
    try:
        _fail(line, error)
    finally:
        os._exit(1)


def _one_line(error: BaseException) -> str:
    """The error for a client: its type and first line, without a traceback."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
