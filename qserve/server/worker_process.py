"""The worker process: `python -m qserve.server.worker_process --fd N`. Makes jobs of large bodies.

The server starts it and it ends when the server is gone. Knows no HTTP and no engine.
"""

import argparse
import socket
import sys
from dataclasses import replace

from qserve import frames, logs
from qserve.server.errors import as_api_error
from qserve.server.jobs import JOBS
from qserve.server.served_model import ServedModel
from qserve.server.worker_messages import (
    Failed,
    FromWorker,
    Prepare,
    Prepared,
    Setup,
    ToWorker,
    decode,
    encode,
)
from qserve.text import Tokenizer


def main(argv: list[str] | None = None) -> int:
    """Answer until the server is gone. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="qserve.server.worker_process")
    parser.add_argument("--fd", type=int, required=True, help="the connected socket")
    logs.add_arguments(parser)
    arguments = parser.parse_args(argv)
    connection = socket.socket(fileno=arguments.fd)
    logs.configure(arguments.log_level, arguments.log_format, text="%(message)s")
    try:
        model = _load(decode(frames.receive(connection), ToWorker))
        while True:
            message = decode(frames.receive(connection), ToWorker)
            body = frames.receive(connection)
            connection.sendall(encode(_answer(model, message, body)))
    except (EOFError, ConnectionError):
        return 0


def _load(setup: Setup) -> ServedModel:
    return ServedModel(
        names=setup.names,
        tokenizer=Tokenizer(setup.folder),
        defaults=setup.defaults,
        max_model_len=setup.max_model_len,
        vocab_size=setup.vocab_size,
        chat_special_tokens=setup.chat_special_tokens,
        auto_tool_parser=setup.auto_tool_parser,
        reasoning_parser=setup.reasoning_parser,
    )


def _answer(model: ServedModel, message: Prepare, body: bytes) -> FromWorker:
    model = replace(model, adapters=message.adapters)
    try:
        return Prepared(job=JOBS[message.route](model, body, message.arrived))
    except Exception as error:
        found = as_api_error(error)
        return Failed(status=found.status, message=found.short_message, param=found.param)


if __name__ == "__main__":
    sys.exit(main())
