"""The process of one rank: `python -m qserve.engine.distributed.rank_process --fd N`.

N is a socket to the leader; `--connect HOST:PORT` reaches a leader on another machine. The process
runs the calls that the leader sends, in order, and exits when the leader's connection closes.
"""

import argparse
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.distributed.rank_channel import BEGIN, DONE, FAILED, REFUSED, call, unpack
from qserve.processes import frames, logs

TOKEN_VARIABLE = "QSERVE_RANK_TOKEN"  # secret with which a rank authenticates to the leader
EXIT_GRACE = 2.0  # seconds for a running step to finish after the leader is gone

logger = logging.getLogger(__name__)


class _Rank:
    """Target of the leader's calls: a call runs the method of its name and may return a reply."""

    def start(
        self,
        config: EngineConfig,
        max_model_len: int,
        rank: int,
        index: int,
        num_here: int,
        address: str,
    ) -> None:
        """Choose the device. `index`: index of this rank's device among `num_here` devices here."""
        import torch

        from qserve.engine.runner.devices import pick_device, use_device

        torch.set_grad_enabled(False)
        self._config, self._rank, self._address = config, rank, address
        self._max_model_len = max_model_len
        self._device = pick_device(config, index, num_here)
        use_device(self._device, config)

    def load(self) -> tuple:
        """Join the other ranks and load this rank's shard. Returns the worker's facts."""
        from qserve.engine.distributed.joining import join_ranks
        from qserve.engine.runner.worker import Worker
        from qserve.engine.sizes import read_model

        config = self._config
        model = read_model(config)
        ranks = join_ranks(config, model, self._address, self._rank, self._device)
        self._ranks = ranks
        self._worker = Worker(config, model, self._max_model_len, self._device, ranks)
        gc.freeze()
        return self._worker.facts()

    def finish(self) -> None:
        """Wait for all work on the device."""
        worker = vars(self).get("_worker")  # None: no model was loaded
        if worker is not None:
            worker.finish()

    def leave(self) -> None:
        """Leave the process group. The leader leaves it at the same time."""
        known = vars(self)
        if "_worker" in known:
            self._worker.close()
        if "_ranks" in known:
            self._ranks.leave()

    def __getattr__(self, name: str):
        return getattr(self._worker.transfers if name in TRANSFERS else self._worker, name)


OPENED = ("open_pages", "open_peer")
SENT = (
    *("send_pages", "expect_no_more_pages", "cancel_pages"),
    *("send_states", "expect_no_more_states", "cancel_states"),
)
# Calls with a reply. The return values of other calls are not sent.
ANSWERED = ("start", "load", "warm_up_shapes", "num_pages_that_fit", "prepare", *OPENED)
CALLS = (
    *(*ANSWERED, "compile_kernels", "offload_pages", "launch", "logits", "capture_next"),
    *("place_adapter", "forget_adapter", "set_aux_layers", "prepare_replay", "run_replay"),
    *("overlap_sums", "leave"),
    *SENT,
)
BEGUN_TRANSFERS = (
    *("match_pages", "load_pages", "save_pages"),
    *("deepest_states", "load_states", "save_states", "receive_pages", "receive_states"),
)
# Calls for a thread: they return a future, and its result is the reply.
BEGUN = ("read_adapter", "reside", *BEGUN_TRANSFERS)
# Calls that RankTransfers handles. The worker handles the others.
TRANSFERS = (*OPENED, *SENT, *BEGUN_TRANSFERS)


def main(argv: list[str] | None = None) -> int:
    """Run the leader's calls until the leader is gone. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="qserve.engine.distributed.rank_process")
    parser.add_argument("--fd", type=int, help="a connected socket")
    parser.add_argument("--connect", help="or the leader's address, HOST:PORT")
    parser.add_argument("--rank", type=int, required=True, help="for log lines")
    logs.add_arguments(parser)
    arguments = parser.parse_args(argv)
    text = logs.named(f"rank {arguments.rank}")
    logs.configure(arguments.log_level, arguments.log_format, text)
    if arguments.fd is not None:
        connection = socket.socket(fileno=arguments.fd)
    else:
        connection = _connect(arguments.connect, arguments.rank)
    threading.Thread(target=_watch, args=(connection,), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # ProcessHandle.print_stacks
    leader, rank = _LeaderConnection(connection), _Rank()
    try:
        _import_all()
        while True:
            name, *values = unpack(frames.receive(connection))
            if name == BEGIN:
                number, name, *values = values
                if name not in BEGUN:
                    raise frames.MessageError(
                        f"the leader called {name!r}, which is not a known background call"
                    )
                leader.answer_later(number, getattr(rank, name)(*values))
                continue
            if name not in CALLS:
                raise frames.MessageError(f"the leader called {name!r}, which is not a known call")
            result = getattr(rank, name)(*values)
            if name in ANSWERED:
                leader.send("reply", result)
    except (EOFError, ConnectionError):
        rank.finish()  # the leader's last step needs this rank; _watch ends it after EXIT_GRACE
        return 0
    except Exception as error:
        leader.fail(error)
    return 1


class _LeaderConnection:
    """Connection to the leader. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, name: str, *values: Any) -> None:
        with self._sending:
            self._connection.sendall(call(name, *values))

    def answer_later(self, number: int, begun: Future) -> None:
        """Send the result of a future once it is done."""
        begun.add_done_callback(lambda done: self._answer(number, done))

    def fail(self, error: Exception) -> None:
        """Send the error that ends this rank."""
        if isinstance(error, InputError):
            failure = error.subject, error.problem, error.remedy
        else:
            logger.error("The rank failed", exc_info=error)
            failure = "", _one_line(error), ""
        try:
            self.send(FAILED, *failure)
        except OSError:
            logger.warning("The leader ended before this error could be sent: %s", failure)

    def _answer(self, number: int, done: Future) -> None:
        try:
            self.send(DONE, number, done.result())
        except InputError as error:
            self.send(REFUSED, number, error.subject, error.problem, error.remedy)
        except ConnectionError:
            logger.debug("The leader ended before this answer could be sent")
        except Exception as error:  # steps do not depend on these calls
            logger.exception("A background call of the leader failed")
            self.send(REFUSED, number, "", _one_line(error), "")


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _import_all() -> None:
    """Import the modules of the calls, which takes seconds, while the leader imports its own."""
    import qserve.engine.distributed.joining
    import qserve.engine.runner.worker
    import qserve.engine.sizes  # noqa: F401


def _connect(address: str, rank: int) -> socket.socket:
    """Connect to a leader on another machine; send the rank's number and token."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    token = os.environ.pop(TOKEN_VARIABLE)
    connection.sendall(frames.frame(f"{rank} {token}".encode()))
    return connection


def _watch(connection: socket.socket) -> None:
    """End the process when the leader is gone, even if the main thread is blocked."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    time.sleep(EXIT_GRACE)
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A regular exit would wait for process groups that the other ranks have left.
    os._exit(code)
