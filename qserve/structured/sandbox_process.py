"""The sandbox process: `python -m qserve.structured.sandbox_process --fd N`.

N is a connected Unix socket. The process forks for each grammar. The fork compiles the grammar and
exits. Kernel limits bound the fork's memory and time, and all its memory returns to the system. The
process reads the model's vocabulary once, and forks share it. It exits when its client closes the
socket.

The process has one thread and does not use numpy, which starts threads. A fork does not copy other
threads, and would wait forever for the locks that they held.
"""

import argparse
import ctypes
import fcntl
import gc
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from formats.errors import InputError, one_line
from qserve.processes import frames
from qserve.structured import sandbox_messages
from qserve.structured.backend import library, limits
from qserve.structured.grammar import grammar_text, refusal
from qserve.structured.heap import live_bytes, return_free_memory
from qserve.structured.params import StructuredOutputsParams
from qserve.structured.sandbox_messages import Begun, Compiled, GrammarRefused, Setup

# Stack size of a fork. It is less than the 2 to 8 MiB of the engine's threads, which compile the
# grammar afterwards.
STACK_BYTES = 2**20
NICENESS = 10  # the engine's steps have priority


def main(argv: list[str] | None = None) -> int:
    """Fork for each grammar, until the client closes the socket. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="qserve.structured.sandbox_process")
    parser.add_argument("--fd", type=int, required=True, help="the connected socket")
    connection = socket.socket(fileno=parser.parse_args(argv).fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    try:
        setup = sandbox_messages.decode(frames.receive(connection), Setup)
        tokenizer = _tokenizer(setup)
        os.nice(NICENESS)
        return_free_memory()  # so that forks cannot use freed memory beyond their limit
        gc.freeze()
        while True:
            data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if not data:
                return 0
            with socket.socket(fileno=descriptors[0]) as job:
                if os.fork() == 0:
                    _run_fork(connection, job, setup, tokenizer)
    except (EOFError, ConnectionError):
        return 0


def _tokenizer(setup: Setup) -> object:
    text = setup.tokenizer or Path(setup.tokenizer_path).read_text(encoding="utf-8")
    return library().LLTokenizer(
        text, n_vocab=setup.vocab_size, eos_token=list(setup.eos_token_ids) or None
    )


def _run_fork(
    connection: socket.socket, job: socket.socket, setup: Setup, tokenizer: object
) -> None:
    """Run one job in a fork, and end the fork in any case."""
    try:
        connection.close()
        params = sandbox_messages.decode(frames.receive(job), StructuredOutputsParams)
        _limit(setup)
        _end_with_client(job, True)
        job.sendall(frames.frame(sandbox_messages.encode(Begun())))
        answer = _answer(params, setup, tokenizer)
        _end_with_client(job, False)
        job.sendall(frames.frame(sandbox_messages.encode(answer)))
    finally:
        os._exit(0)


def _limit(setup: Setup) -> None:
    """Set kernel limits on this process's memory, CPU time and wall time."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = size + setup.max_bytes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, setup.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, setup.wall_seconds)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # Rust reports failed allocations there


def _end_with_client(job: socket.socket, ends: bool) -> None:
    """Set whether the kernel ends this process when the client closes the job's socket."""
    flags = fcntl.fcntl(job, fcntl.F_GETFL)
    if ends:
        fcntl.fcntl(job, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(job, fcntl.F_SETFL, flags | os.O_ASYNC)
    else:
        fcntl.fcntl(job, fcntl.F_SETFL, flags & ~os.O_ASYNC)


def _answer(
    params: StructuredOutputsParams, setup: Setup, tokenizer: object
) -> Compiled | GrammarRefused:
    try:
        return _compile(params, setup, tokenizer)
    except InputError as error:
        return GrammarRefused(subject=error.subject, problem=error.problem, remedy=error.remedy)
    except BaseException as error:  # a panic of llguidance is not an Exception
        error = refusal(params, f"{type(error).__name__}: {one_line(error)}")
        return GrammarRefused(subject=error.subject, problem=error.problem, remedy=error.remedy)


def _compile(params: StructuredOutputsParams, setup: Setup, tokenizer: object) -> Compiled:
    text = grammar_text(params)
    before = live_bytes()
    matcher = library().LLMatcher(tokenizer, text, limits=limits(), log_level=0)
    if not matcher.is_error():
        words = (ctypes.c_int32 * -(-setup.vocab_size // 32))()
        matcher.unsafe_compute_mask_ptr(ctypes.addressof(words), ctypes.sizeof(words))
    if matcher.is_error():
        raise refusal(params, matcher.get_error())
    whole = live_bytes()
    copy = matcher.deep_copy()
    size, copy_size = whole - before, live_bytes() - whole
    del copy
    return Compiled(text=text, num_bytes=max(size, 0) + len(text), copy_bytes=max(copy_size, 0))


if __name__ == "__main__":
    sys.exit(main())
