"""MaskJobs: masks of grammars, which threads make while steps go on. Knows no tensors.

A mask takes 10 to 100 us, one of a grammar that was made to be slow takes a second. No step waits
for such a one. Its row is late: what the step samples for it is dropped, and it is planned again
once the mask is there. The mask is kept, so a row is late once for each token at most.

Where masks follow the launch of a step's forward (`late`), they have until that is done, and
PATIENCE_SECONDS. Where they go along with the launch, of drafts and of several ranks, they are
begun before the step is planned (`prepare`), and a row without one is not planned.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from time import perf_counter

import numpy as np

from qserve.engine.masks import allowed
from qserve.engine.request import Request, Status
from qserve.engine.step_plan import StepPlan
from qserve.structured.constraint import Constraint

# That a step waits for masks which were never slow so far. For others it does not.
PATIENCE_SECONDS = 0.005
POLL_SECONDS = 0.0002  # between looks at whether the device is done
IDLE_SECONDS = 0.01  # of an engine that has nothing else to do
# Grammars that were slow have threads of their own, and few, so that the others find one free.
# One that is slow for the first time holds up one of the others.
THREADS = min(8, 2 * (os.cpu_count() or 1))
SLOW_THREADS = 1


class MaskJob:
    """The mask of a request's next token. The request gets no token before it is done."""

    def __init__(self, request: Request) -> None:
        """Begin. All tokens of the request are known."""
        self.num_known = request.num_known
        self.is_late = False  # a step went on without it
        self._constraint = request.constraint
        self._future: Future[np.ndarray | None] = _threads(self._constraint.is_slow).submit(
            allowed, request, request.num_known, request.token_ids, request.constraint
        )

    @property
    def future(self) -> Future:
        return self._future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    @property
    def may_take_long(self) -> bool:
        return self.is_late or self._constraint.is_slow

    def mask(self) -> np.ndarray | None:
        """Wait for it; None where no token may follow."""
        return self._future.result()


class DraftMasks:
    """The masks along a request's drafts. They have a state of the grammar of their own.

    It is copied on the engine's thread: the request's takes tokens there, and the library lets
    nobody read one meanwhile. Of a schema of 2744 properties a copy takes 5 us after 200 tokens and
    16 us after 800; after 8000 of a regular expression 26 us. What the thread does for each draft
    takes 140 us and 10 us (one core, llguidance 1.9.1).
    """

    def __init__(self, request: Request, drafts: Sequence[int]) -> None:
        """Begin. What the request gets meanwhile changes nothing here."""
        self.found: list[np.ndarray | None] = []  # as far as they are done
        self._token_ids = [*request.token_ids]
        cursor = request.constraint.copy()
        self._future = _threads(False).submit(self._follow, request, drafts, cursor)

    @property
    def future(self) -> Future:
        return self._future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def _follow(self, request: Request, drafts: Sequence[int], cursor: Constraint) -> None:
        for draft in drafts:
            cursor.take(draft)
            self._token_ids.append(draft)
            self.found.append(allowed(request, len(self._token_ids), self._token_ids, cursor))
            if self.found[-1] is None:
                return


class MaskJobs:
    """Those of one engine."""

    def __init__(self, *, waits: bool = False) -> None:
        """`waits`: masks go along with the launch, so rows wait for the token before."""
        self.waits = waits
        self._requests: dict[str, Request] = {}  # that have a grammar, or will

    def add(self, request: Request) -> None:
        """Watch over the masks of a new request, if it has any."""
        has_grammar = request.params.structured_outputs is not None
        if has_grammar:
            self._requests[request.request_id] = request
        token_filter = request.token_filter
        if has_grammar or (token_filter is not None and token_filter.follows_output):
            request.follows_last |= self.waits

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def prepare(self) -> None:
        """Where rows wait: begin masks of all whose tokens are known, and wait a little."""
        if not self.waits:
            return
        ready = [
            request
            for request in self._requests.values()
            if request.constraint is not None and not request.num_pending
        ]
        if ready:
            _wait([_job(request) for request in ready], is_computing=lambda: False)

    def begin(self, plan: StepPlan) -> None:
        """Begin the masks of a step that follow no token in flight."""
        for request, _, _, num_sampled in plan.chunks:
            if num_sampled and request.constraint is not None and request.num_pending == 1:
                _job(request)

    def late(self, plan: StepPlan, is_computing: Callable[[], bool]) -> frozenset[Request]:
        """The rows of a step that has to sample without their masks; waits a little for them.

        All tokens before its own are known. `is_computing`: whether it would have to wait anyway.
        """
        wanted = [
            chunk.request
            for chunk in plan.chunks
            if chunk.num_sampled
            and chunk.request.constraint is not None
            and chunk.request.status is not Status.FINISHED
        ]
        jobs = [_job(request) for request in wanted]
        _wait(jobs, is_computing)
        pairs = zip(wanted, jobs, strict=True)
        return frozenset(request for request, job in pairs if not job.is_done)

    def wait_a_little(self) -> None:
        """Of an engine whose requests all wait for masks."""
        jobs = [request.mask_job for request in self._requests.values()]
        futures = [job.future for job in jobs if job is not None and not job.is_done]
        if futures:
            wait(futures, IDLE_SECONDS, FIRST_COMPLETED)


def mask_of(request: Request) -> np.ndarray | None:
    """The mask of a request's next token; None where no token may follow."""
    return _job(request).mask()


def masks_along(requests: Sequence[Request]) -> list[list[np.ndarray | None]]:
    """The masks along the drafts of each; fewer where one is late. None: no token may follow."""
    begun = [DraftMasks(request, request.drafts) for request in requests]
    wait([each.future for each in begun], PATIENCE_SECONDS)
    for request, each in zip(requests, begun, strict=True):
        request.draft_job = each
    return [list(each.found) for each in begun]


def _job(request: Request) -> MaskJob:
    """The job of a request's next token, which begins now if it has not yet."""
    job = request.mask_job
    if job is None or job.num_known != request.num_known:
        job = request.mask_job = MaskJob(request)
    return job


def _wait(jobs: Sequence[MaskJob], is_computing: Callable[[], bool]) -> None:
    deadline = perf_counter() + PATIENCE_SECONDS
    while missing := [job for job in jobs if not job.is_done]:
        left = deadline - perf_counter()
        if is_computing():
            wait([job.future for job in missing], POLL_SECONDS)
            continue
        hopeful = [job.future for job in missing if not job.may_take_long]
        if left <= 0 or not hopeful:
            for job in missing:
                job.is_late = True
            return
        wait(hopeful, left)


@cache
def _threads(are_slow: bool) -> ThreadPoolExecutor:
    if are_slow:
        return ThreadPoolExecutor(SLOW_THREADS, "slow masks")
    return ThreadPoolExecutor(THREADS, "masks")
