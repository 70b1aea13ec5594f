"""The process of one rank: `python -m qserve.engine.rank_process --fd N`, N a socket to the leader.

Of a leader on another machine it is given the address. It makes the calls that the leader sends,
one after the other, and ends when the leader is gone. Loads nothing of the server's.
"""

import argparse
import gc
import logging
import os
import select
import socket
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from formats.errors import InputError
from qserve import frames, logs
from qserve.config import EngineConfig
from qserve.engine.packing import unpack
from qserve.engine.rank_link import BEGIN, DONE, FAILED, REFUSED, call

TOKEN_VARIABLE = "QSERVE_RANK_TOKEN"  # what a leader lets ranks in by
EXIT_GRACE = 2.0  # seconds that a step may still run after the leader is gone

logger = logging.getLogger(__name__)


class _Rank:
    """What the leader's calls act on. A method is a call; what it returns is the reply."""

    def start(
        self,
        config: EngineConfig,
        max_model_len: int,
        rank: int,
        index: int,
        num_here: int,
        address: str,
    ) -> None:
        """Choose the device. `index`: of the rank among the `num_here` of this machine."""
        import torch

        from qserve.engine.devices import pick_device, use_device

        torch.set_grad_enabled(False)
        self._config, self._rank, self._address = config, rank, address
        self._max_model_len = max_model_len
        self._device = pick_device(config, index, num_here)
        use_device(self._device, config)

    def load(self) -> tuple:
        """Meet the other ranks, then load our part of the model. Returns its facts."""
        from qserve.engine.worker import Worker
        from qserve.model.model_config import ModelConfig
        from qserve.parallel.ranks import join

        config = self._config
        model = ModelConfig.from_folder(config.model)
        ranks = join(
            self._address,
            self._rank,
            tensor_parallel_size=config.tensor_parallel_size,
            stages=config.pipeline_parallel_size,
            device=self._device,
            all_reduce=config.all_reduce,
            hidden_size=model.hidden_size,
        )
        self._worker = Worker(config, model, self._max_model_len, self._device, ranks)
        gc.freeze()
        return self._worker.facts()

    def finish(self) -> None:
        """Wait until the device has done what it was told to."""
        worker = vars(self).get("_worker")  # None: the model was never loaded
        if worker is not None:
            worker.finish()

    def __getattr__(self, name: str):
        return getattr(self._worker, name)


# Calls whose reply the leader waits for; of all others what comes back stays here.
ANSWERED = ("start", "load", "warm_up_shapes", "num_pages_that_fit", "prepare", "open_pages")
CALLS = (
    *(*ANSWERED, "compile_kernels", "offload_pages", "launch", "logits", "capture_next"),
    *("place_adapter", "forget_adapter", "tap", "prepare_replay", "run_replay"),
)
# Calls that return a future, whose result is the reply.
BEGUN = ("read_adapter", "match_pages", "load_pages", "save_pages")


def main(argv: list[str] | None = None) -> int:
    """Make the leader's calls until it is gone. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="qserve.engine.rank_process")
    parser.add_argument("--fd", type=int, help="a connected socket")
    parser.add_argument("--connect", help="or the leader's address, HOST:PORT")
    parser.add_argument("--rank", type=int, required=True, help="for log lines")
    logs.add_arguments(parser)
    arguments = parser.parse_args(argv)
    text = f"%(levelname)s rank {arguments.rank} %(name)s: %(message)s"
    logs.configure(arguments.log_level, arguments.log_format, text)
    if arguments.fd is not None:
        connection = socket.socket(fileno=arguments.fd)
    else:
        connection = _connect(arguments.connect, arguments.rank)
    threading.Thread(target=_watch, args=(connection,), daemon=True).start()
    line, rank = _Line(connection), _Rank()
    try:
        while True:
            name, *values = unpack(frames.receive(connection))
            if name == BEGIN:
                number, name, *values = values
                if name not in BEGUN:
                    raise frames.MessageError(f"the leader begins {name!r}, which no rank knows")
                line.answer_later(number, getattr(rank, name)(*values))
                continue
            if name not in CALLS:
                raise frames.MessageError(f"the leader asks for {name!r}, which no rank knows")
            result = getattr(rank, name)(*values)
            if name in ANSWERED:
                line.send("reply", result)
    except (EOFError, ConnectionError):
        rank.finish()  # the leader's last step needs our part; _watch ends what takes too long
        return 0
    except Exception as error:
        line.fail(error)
    return 1


class _Line:
    """The way back to the leader. All threads may use it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, name: str, *values: Any) -> None:
        with self._sending:
            self._connection.sendall(call(name, *values))

    def answer_later(self, number: int, begun: Future) -> None:
        """Send what comes of it."""
        begun.add_done_callback(lambda done: self._answer(number, done))

    def fail(self, error: Exception) -> None:
        """Say why the rank ends."""
        if isinstance(error, InputError):
            failure = error.subject, error.problem, error.remedy
        else:
            logger.error("The rank failed", exc_info=error)
            failure = "", _one_line(error), ""
        try:
            self.send(FAILED, *failure)
        except OSError:
            logger.warning("The leader was gone before it could be told: %s", failure)

    def _answer(self, number: int, done: Future) -> None:
        try:
            self.send(DONE, number, done.result())
        except InputError as error:
            self.send(REFUSED, number, error.subject, error.problem, error.remedy)
        except ConnectionError:
            logger.debug("The leader was gone before it could be told")
        except Exception as error:  # what is begun is help: steps can do without it
            logger.exception("What the leader had begun failed")
            self.send(REFUSED, number, "", _one_line(error), "")


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _connect(address: str, rank: int) -> socket.socket:
    """Connect to a leader on another machine, and say who we are."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    token = os.environ.pop(TOKEN_VARIABLE)
    connection.sendall(frames.frame(f"{rank} {token}".encode()))
    return connection


def _watch(connection: socket.socket) -> None:
    """End the process when the leader is gone, whatever the main thread waits for."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    time.sleep(EXIT_GRACE)
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Groups that nobody else is in any more would be waited for at a regular end.
    os._exit(code)
