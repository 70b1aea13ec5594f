"""The engine process: `python -m qserve.engine.process --fd N`, N a connected Unix socket.

The client starts it and it ends when the client is gone. One thread reads messages into a queue;
the main thread alone touches the engine. Knows no text and no HTTP.
"""

import argparse
import importlib
import logging
import os
import queue
import socket
import sys
import threading
import time

from formats.errors import InputError
from qserve.engine import messages
from qserve.engine.messages import (
    Abort,
    Add,
    EngineDied,
    Events,
    Ready,
    Refused,
    Start,
    StartFailed,
)
from qserve.engine.request import RequestEvent

ENGINE = "qserve.engine.engine:Engine"
EXIT_GRACE = 2.0  # seconds that a step or a load may still run after the client is gone

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """There is nobody to work for any more."""


def main(argv: list[str] | None = None) -> int:
    """Load, report, serve until the client is gone. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="qserve.engine.process")
    parser.add_argument("--fd", type=int, required=True, help="the connected socket")
    parser.add_argument("--engine", default=ENGINE, help=argparse.SUPPRESS)  # tests give their own
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    connection = socket.socket(fileno=arguments.fd)
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    try:
        engine = _start(arguments.engine, connection, inbox)
        if engine is None:
            return 1
        while True:
            _take_messages(engine, connection, inbox)
            _step(engine, connection)
    except (ClientGone, ConnectionError):
        return 0
    except Exception as error:
        logger.exception("The engine failed")
        _send_last(connection, EngineDied(message=_one_line(error)))
        return 1


def _read(connection: socket.socket, inbox: queue.SimpleQueue) -> None:
    """Feed the queue; None means that the client is gone."""
    try:
        while True:
            inbox.put(messages.receive(connection, messages.ToEngine))
    except (EOFError, OSError):
        pass
    except messages.MessageError:
        logger.exception("The client sent something else than a message")
    inbox.put(None)
    time.sleep(EXIT_GRACE)
    # The main thread is in a load or a step that does not end, and it holds the GPU.
    os._exit(1)


def _start(engine_path: str, connection: socket.socket, inbox: queue.SimpleQueue) -> object | None:
    """The engine that the first message asks for, or None after saying why there is none."""
    message = inbox.get()
    if not isinstance(message, Start):
        raise ClientGone
    try:
        module, _, name = engine_path.partition(":")
        engine = getattr(importlib.import_module(module), name)(message.config)
    except InputError as error:
        failure = StartFailed(subject=error.subject, problem=error.problem, remedy=error.remedy)
    except Exception as error:
        logger.exception("The engine could not be started")
        failure = StartFailed(subject=message.config.model, problem=_one_line(error))
    else:
        ready = Ready(
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            report=engine.report(),
        )
        connection.sendall(messages.encode(ready))
        return engine
    _send_last(connection, failure)
    return None


def _take_messages(engine: object, connection: socket.socket, inbox: queue.SimpleQueue) -> None:
    """Handle all messages that have come; wait for one when there is nothing to compute."""
    while not (inbox.empty() and engine.has_work()):
        message = inbox.get()
        if isinstance(message, Add):
            try:
                engine.add_request(
                    message.request_id,
                    message.prompt_token_ids,
                    message.params,
                    message.sent,
                    client=message.client,
                    group=message.group,
                )
            except InputError as error:
                refusal = Refused(
                    request_id=message.request_id,
                    subject=error.subject,
                    problem=error.problem,
                    remedy=error.remedy,
                )
                connection.sendall(messages.encode(refusal))
        elif isinstance(message, Abort):
            engine.abort(message.request_id)
            if not engine.has_work():
                _send(connection, [], engine)  # no step will come to tell it
        else:
            raise ClientGone


def _step(engine: object, connection: socket.socket) -> None:
    _send(connection, engine.step(), engine)


def _send(connection: socket.socket, events: list[RequestEvent], engine: object) -> None:
    connection.sendall(messages.encode(Events(events=events, report=engine.report())))


def _send_last(connection: socket.socket, message: EngineDied | StartFailed) -> None:
    try:
        connection.sendall(messages.encode(message))
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        logger.warning("The client was gone before it could be told: %s", message)


def _one_line(error: Exception) -> str:
    """The error for a client: its type and first line, without a traceback."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
