"""The worker process: converts bodies to jobs if they are large or run the model's chat template.

The server starts it as `python -m qserve.server.prepare.worker_process --fd N`. A chat template is
a program from the model's folder, which may need any amount of time and memory. This process limits
both; beyond a limit only this process dies. The process exits when the server's socket closes.
"""

import argparse
import resource
import signal
import socket
import sys
from dataclasses import replace

from qserve.multimodal.reader import MediaReader
from qserve.processes import frames, logs
from qserve.server.http.errors import ApiError, as_api_error
from qserve.server.prepare.preparation import prepare
from qserve.server.prepare.worker_messages import (
    Answered,
    Failed,
    Loaded,
    Prepare,
    Prepared,
    Setup,
    ToWorker,
    decode,
    encode,
)
from qserve.server.requests.served_model import ServedModel
from qserve.text.tokenizer import Tokenizer

MORE_MEMORY = 4 * 2**30  # bytes of address space for bodies, after the tokenizer is loaded


def main(argv: list[str] | None = None) -> int:
    """Prepare bodies until the server closes the socket. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="qserve.server.prepare.worker_process")
    parser.add_argument("--fd", type=int, required=True, help="the connected socket")
    logs.add_arguments(parser)
    arguments = parser.parse_args(argv)
    connection = socket.socket(fileno=arguments.fd)
    logs.configure(arguments.log_level, arguments.log_format, text="%(message)s")
    # The server recognizes an exceeded time limit by the exit code.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        load = decode(frames.receive(connection), ToWorker)
        tokenizer = Tokenizer(load.folder, load.tokenizer_folder)
        tokenizer.import_renderer()  # while the engine loads the model
        model = _served(tokenizer, decode(frames.receive(connection), ToWorker))
        _limit_memory()
        connection.sendall(encode(Loaded()))
        while True:
            message = decode(frames.receive(connection), ToWorker)
            body = frames.receive(connection)
            signal.setitimer(signal.ITIMER_PROF, message.seconds)
            answer = _answer(model, message, body)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(answer)
    except (EOFError, ConnectionError):
        return 0


def _limit_memory() -> None:
    """Limit this process's address space. `_answer` turns a MemoryError into a 400."""
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + MORE_MEMORY
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _served(tokenizer: Tokenizer, setup: Setup) -> ServedModel:
    media = None
    if setup.media is not None:
        media = MediaReader(tokenizer.folder, tokenizer.encode, setup.media, setup.media_kinds)
        media.load()  # before the memory limit is set, so that it does not count
    return ServedModel(
        names=setup.names,
        tokenizer=tokenizer,
        defaults=setup.defaults,
        max_model_len=setup.max_model_len,
        vocab_size=setup.vocab_size,
        chat_special_tokens=setup.chat_special_tokens,
        auto_tool_parser=setup.auto_tool_parser,
        reasoning_parser=setup.reasoning_parser,
        structured_output_strict=setup.structured_output_strict,
        media=media,
        without_media=setup.without_media,
    )


def _answer(model: ServedModel, message: Prepare, body: bytes) -> bytes:
    """Return the frames of the reply to one Prepare message."""
    model = replace(model, adapters=message.adapters)
    try:
        made = prepare(model, message.route, body, message.arrival)
        if isinstance(made, bytes):
            return encode(Answered()) + frames.frame(made)
        return encode(Prepared(job=made))
    except frames.MessageError:
        found = ApiError(400, "The body has more tokens than one response can hold.", "Split it.")
    except MemoryError:
        found = ApiError(400, "Preparing the body exceeds the memory limit.", "Shorten it.")
    except Exception as error:
        found = as_api_error(error)
    return encode(Failed(status=found.status, message=found.short_message, param=found.param))


if __name__ == "__main__":
    sys.exit(main())
