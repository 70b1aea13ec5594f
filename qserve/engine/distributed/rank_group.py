"""RankGroup: the leader's view of the other ranks of a model.

If one rank dies, all ranks end: the others would wait forever for the dead rank in an all-reduce.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from qkernels.collective.channels import PeerLostError
from qserve.engine.distributed.rank_channel import Failure, RankChannel, call

GRACE_SECONDS = 3.0  # time for the leader's thread to notice that a rank died
STUCK_SECONDS = 15.0  # the same if there is no `on_stuck` callback; then the process exits
FAILURE_SECONDS = 5.0  # wait after an error, until the rank's death that explains it is known

logger = logging.getLogger(__name__)


class RankGroup:
    """Connections to ranks 1 and up."""

    def __init__(
        self, make_links: Callable[[Callable[[Failure], None]], list[RankChannel]]
    ) -> None:
        """`make_links` creates the channels. Its argument is the callback for a rank's death."""
        self._failure: Failure | None = None
        self._has_failed = threading.Event()
        self._lock = threading.Lock()
        self._was_reported = False  # True once the leader's thread has raised the failure
        self._on_stuck: Callable[[Exception], None] | None = None
        self._exit = _Exit()
        self.is_waiting = False  # True while the leader's thread may wait for ranks in a step
        died = weakref.WeakMethod(self._died)

        def on_death(failure: Failure) -> None:
            method = died()
            if method is not None:
                method(failure)

        self._links = make_links(on_death)
        # The finalizer also ends the ranks if the model is garbage-collected without `close`, or
        # still exists when the process exits.
        self._end = weakref.finalize(self, self._exit.run, self._links)

    def at_leave(self, leave: Callable[[], None]) -> None:
        """Call `leave` when the ranks end.

        `leave` finishes the leader's work and leaves the process group; the other ranks leave at
        the same time. If a rank has failed, `abort` is called first.
        """
        self._exit.leave = leave

    def at_end(self, work: Callable[[], None]) -> None:
        """Call `work` after the ranks have ended."""
        self._exit.last.append(work)

    def watch(
        self,
        *,
        abort: Callable[[], None] | None = None,
        on_stuck: Callable[[Exception], None] | None = None,
    ) -> None:
        """Set the callbacks for the death of a rank.

        `abort` stops the leader's communication with the dead rank. `on_stuck` is called if the
        leader's thread has not raised the error within GRACE_SECONDS: it is stuck or idle.
        """
        self._exit.abort = abort or self._exit.abort
        self._on_stuck = on_stuck or self._on_stuck

    def send(self, name: str, *values: Any) -> None:
        """Send a call to every rank. Raises the error of a dead rank."""
        self.check()
        frame = call(name, *values)
        for link in self._links:
            link.send(frame)

    def begin(self, name: str, *values: Any) -> list[Future]:
        """Start a call in a thread of every rank. Thread-safe. Raises the error of a dead rank."""
        self.check()
        return [link.begin(name, *values) for link in self._links]

    def replies(self) -> list[Any]:
        """Wait for the next reply of each rank. Raises the error of a dead rank."""
        found = [link.reply() for link in self._links]
        if None in found:
            self._has_failed.wait(FAILURE_SECONDS)
        self.check()
        return found

    @property
    def has_failed(self) -> bool:
        """True if a rank died, or a step was left unfinished."""
        return self._failure is not None

    def check(self) -> None:
        """Raise the error of a dead rank."""
        if self._failure is not None:
            self._was_reported = True
            raise self._failure.as_error()

    def explain(self, error: BaseException) -> None:
        """Raise the error of a dead rank if its death caused `error`, an error in the leader.

        If all ranks live but one did not take part in an all-reduce, all ranks print their stacks.
        """
        if self._has_failed.wait(FAILURE_SECONDS):
            self._was_reported = True
            raise self._failure.as_error() from error
        if isinstance(error, PeerLostError):
            for link in self._links:
                link.print_stacks()

    def forbid_steps(self, reason: str) -> None:
        """Prevent further steps, because the leader left a step unfinished."""
        if self._failure is None:
            self._failure = Failure(0, "", reason, "")
            self._exit.has_failed = True

    def close(self) -> None:
        """End all ranks."""
        self._end()

    def _died(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is not None:
                return  # the death of one rank ends the others
            self._failure = failure
            self._exit.has_failed = True
        self._has_failed.set()
        error = failure.as_error()
        logger.error("%s", error)
        self._exit.abort()
        seconds = GRACE_SECONDS if self._on_stuck is not None else STUCK_SECONDS
        timer = threading.Timer(seconds, self._escalate, (error,))
        timer.daemon = True
        timer.start()

    def _escalate(self, error: Exception) -> None:
        if self._was_reported:
            return
        if self._on_stuck is not None:
            self._on_stuck(error)
        elif self.is_waiting:
            # Nothing in this process can end a kernel that waits for another GPU.
            logger.critical("Exiting the process: a step waits for a dead rank")
            os._exit(1)


class _Exit:
    """Ends all ranks. It outlives the `RankGroup`, so it holds no reference to the group."""

    def __init__(self) -> None:
        self.has_failed = False  # a rank died, or a step was left unfinished
        self.leave: Callable[[], None] = lambda: None
        self.abort: Callable[[], None] = lambda: None
        self.last: list[Callable[[], None]] = []

    def run(self, links: Sequence[RankChannel]) -> None:
        if self.has_failed:
            self.abort()
        else:
            for link in links:
                link.send(call("leave"))
        try:
            self.leave()
        except RuntimeError as error:  # the device failed with the ranks, which end anyway
            logger.warning("Leaving the other ranks failed: %s", error)
        for link in links:
            link.close()
        for link in links:
            link.wait()
        for work in self.last:
            work()
