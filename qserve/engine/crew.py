"""The other ranks of a model, as their leader sees them. Knows calls and processes, no tensors.

A rank that dies ends them all: whoever waits for it in a sum over ranks would wait for ever.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from qserve.engine.rank_link import Failure, RankLink, call

GRACE_SECONDS = 3.0  # that the leader's own thread has to find out that a rank died
STUCK_SECONDS = 15.0  # after which it will not, where nobody else can be told
FAILURE_SECONDS = 5.0  # that an error in a sum over ranks waits for the death that explains it

logger = logging.getLogger(__name__)


class Crew:
    """Ranks 1 and up, connected."""

    def __init__(self, make_links: Callable[[Callable[[Failure], None]], list[RankLink]]) -> None:
        """`make_links`, given what a link calls when its rank dies, makes the links."""
        self._failure: Failure | None = None
        self._has_failed = threading.Event()
        self._lock = threading.Lock()
        self._was_told = False  # whether the leader's thread knows of the failure
        self._abort: Callable[[], None] = lambda: None
        self._on_stuck: Callable[[Exception], None] | None = None
        self.is_waiting = False  # whether the leader's thread may wait for ranks in a step
        died = weakref.WeakMethod(self._died)

        def on_death(failure: Failure) -> None:
            method = died()
            if method is not None:
                method(failure)

        self._links = make_links(on_death)
        # Also where nobody closes it: a model that is collected ends its ranks.
        self._last: list[Callable[[], None]] = []
        self._end = weakref.finalize(self, _close, self._links, self._last)
        self._end.atexit = False  # then ranks see their leader go

    def at_end(self, work: Callable[[], None]) -> None:
        """Do some work once the ranks have ended."""
        self._last.append(work)

    def watch(
        self,
        *,
        abort: Callable[[], None] | None = None,
        on_stuck: Callable[[Exception], None] | None = None,
    ) -> None:
        """`abort` ends what the leader computes with a rank that is gone. `on_stuck` is called
        where the leader's thread has not raised the error after a while, or has nothing to do.
        """
        self._abort = abort or self._abort
        self._on_stuck = on_stuck or self._on_stuck

    def tell(self, name: str, *values: Any) -> None:
        """Let every rank make a call. Raises the error of a rank that is gone."""
        self.check()
        frame = call(name, *values)
        for link in self._links:
            link.send(frame)

    def begin(self, name: str, *values: Any) -> list[Future]:
        """Let a thread of every rank do something. Callable from any thread.

        Raises the error of a rank that is gone.
        """
        self.check()
        return [link.begin(name, *values) for link in self._links]

    def replies(self) -> list[Any]:
        """The next reply of each rank. Raises the error of a rank that is gone."""
        found = [link.reply() for link in self._links]
        if None in found:
            self._has_failed.wait(FAILURE_SECONDS)
        self.check()
        return found

    @property
    def has_failed(self) -> bool:
        """Whether a rank is gone, or a step was left in its middle."""
        return self._failure is not None

    def check(self) -> None:
        """Raise the error of a rank that is gone."""
        if self._failure is not None:
            self._was_told = True
            raise self._failure.as_error()

    def explain(self, error: BaseException) -> None:
        """Raise what is behind an error of the leader's own: the death of a rank, if it was one."""
        if self._has_failed.wait(FAILURE_SECONDS):
            self._was_told = True
            raise self._failure.as_error() from error

    def break_off(self, reason: str) -> None:
        """Let no step follow one that the leader left in its middle."""
        if self._failure is None:
            self._failure = Failure(0, "", reason, "")

    def close(self) -> None:
        """End all ranks."""
        self._end()

    def _died(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is not None:
                return  # of one rank's death the others die, too
            self._failure = failure
        self._has_failed.set()
        error = failure.as_error()
        logger.error("%s", error)
        self._abort()
        seconds = GRACE_SECONDS if self._on_stuck is not None else STUCK_SECONDS
        timer = threading.Timer(seconds, self._escalate, (error,))
        timer.daemon = True
        timer.start()

    def _escalate(self, error: Exception) -> None:
        if self._was_told:
            return
        if self._on_stuck is not None:
            self._on_stuck(error)
        elif self.is_waiting:
            # Nothing in this process can end a kernel that waits for another GPU.
            logger.critical("The process ends: a step waits for a rank that is gone")
            os._exit(1)


def _close(links: Sequence[RankLink], last: Sequence[Callable[[], None]]) -> None:
    for link in links:
        link.close()
    for link in links:
        link.wait()
    for work in last:
        work()
