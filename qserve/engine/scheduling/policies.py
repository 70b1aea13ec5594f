"""Scheduling policies: the admission order, and whether a step holds prompts, decodes or both.

A policy works on requests and counts. `--scheduling-policy` takes a name in POLICIES, or
"module:Class" (or "module.Class") for a user's subclass of Policy.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

from formats.errors import InputError
from qserve.engine.request import Request
from qserve.errors import LEAVE_OUT

FLAG = "--scheduling-policy"
# Number of admissions from lower levels after which a waiting request of a higher level ages. One
# slot in 65 costs the lower levels little and is enough for a background job to finish.
MAX_PASSES = 64
# Maximum number of consecutive prompt-only steps, under any policy. Without it, prompts that end
# with their first token could starve decodes forever.
MAX_PROMPT_STEPS = 64
# Maximum number of requests whose cached pages are compared; more would cost more than it saves.
MAX_COMPARED = 128


class Phase(Enum):
    """Kind of work that a step may hold."""

    MIXED = "mixed"  # a token of every running request, then chunks of prompts
    PROMPTS = "prompts"  # only prompt chunks; decodes if there are no prompts
    DECODES = "decodes"  # only decodes; prompt chunks if there are no decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Queue lengths that a policy sees before a step is planned."""

    num_waiting: int
    num_running: int
    num_prompts_begun: int  # running requests whose prompt is not computed yet


class Policy:
    """First come, first served; clients, and their API requests, take turns. Steps are mixed.

    This is the policy `fcfs`, and the base class of all policies. The scheduler calls `level` and
    `turn` when a request arrives, `phase` and `max_admitted` once per step, and `order` to rank
    waiting requests.
    """

    # After this many admissions from lower levels, the oldest request of the higher levels
    # permanently joins the level of the last admission.
    max_passes: float = MAX_PASSES

    def __init__(self, *, prefill_batch_size: int = 1) -> None:
        self.prefill_batch_size = prefill_batch_size

    def level(self, request: Request) -> Any:
        """Return the level of a request. Lower levels go first and may preempt higher levels."""
        return 0

    def turn(self, request: Request) -> tuple[str, str]:
        """Return client and group. Clients take turns, and so do the groups of each client."""
        return request.client, request.group

    def phase(self, counts: Counts) -> Phase:
        """Return the kind of work that the next step may hold."""
        return Phase.MIXED

    def max_admitted(self, counts: Counts) -> float:
        """Return the maximum number of requests that the next step may admit.

        Called once per step, after `phase`.
        """
        return math.inf

    def admitted(self, request: Request) -> None:
        """Called when a request is admitted to the step that is being planned."""

    def order(
        self, candidates: Iterator[Request], num_cached: Callable[[Request], int]
    ) -> Iterable[Request]:
        """Return the order in which to try waiting requests.

        `candidates`: the first request of each group, in turn. `num_cached`: returns the number of
        cached tokens of a request. This method is not called while a request that has been passed
        over too often must be admitted first.
        """
        return candidates


class Priority(Policy):
    """Lower priority numbers first, regardless of arrival; ties as in fcfs. Requests age."""

    def level(self, request: Request) -> Any:
        return request.priority


class PrefillFirst(Policy):
    """Prompts first whenever there are any, then decodes, as in vLLM V0.

    This gives the shortest time to the first token, but running requests wait.
    """

    def phase(self, counts: Counts) -> Phase:
        return Phase.PROMPTS


class LongestPrefix(Policy):
    """The longest cached prompt prefix first, across all requests."""

    def turn(self, request: Request) -> tuple[str, str]:
        return request.client, request.request_id

    def order(
        self, candidates: Iterator[Request], num_cached: Callable[[Request], int]
    ) -> Iterable[Request]:
        compared = list(islice(candidates, MAX_COMPARED))
        yield from sorted(compared, key=num_cached, reverse=True)
        yield from candidates


class Controlled(Policy):
    """One phase at a time, to study each: `prefill_batch_size` prompts together, then decodes.

    The next prompts start when `prefill_batch_size` prompts wait, or when no request runs.
    """

    def __init__(self, *, prefill_batch_size: int = 1) -> None:
        super().__init__(prefill_batch_size=prefill_batch_size)
        self._num_left = 0  # prompts left to admit of the current batch

    def phase(self, counts: Counts) -> Phase:
        if not self._num_left and not counts.num_prompts_begun:
            enough = counts.num_waiting >= self.prefill_batch_size
            if counts.num_waiting and (enough or not counts.num_running):
                self._num_left = min(self.prefill_batch_size, counts.num_waiting)
        self._num_left = min(self._num_left, counts.num_waiting)
        return Phase.PROMPTS if self._num_left or counts.num_prompts_begun else Phase.DECODES

    def max_admitted(self, counts: Counts) -> float:
        return self._num_left

    def admitted(self, request: Request) -> None:
        self._num_left -= 1


POLICIES: dict[str, type[Policy]] = {
    "fcfs": Policy,
    "priority": Priority,
    "prefill-first": PrefillFirst,
    "longest-prefix": LongestPrefix,
    "controlled": Controlled,
}


def make_policy(name: str, *, prefill_batch_size: int = 1) -> Policy:
    """Create a policy from its name in POLICIES or from module:Class. Raises InputError."""
    kind = POLICIES.get(name) or _load(name)
    return kind(prefill_batch_size=prefill_batch_size)


def _load(path: str) -> type[Policy]:
    module, _, name = path.replace(":", ".").rpartition(".")
    expected = f"expected one of {', '.join(POLICIES)}, or module:Class"
    if not module:
        raise InputError(FLAG, f"{expected}, found {path!r}", LEAVE_OUT)
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            FLAG, f"{path!r} cannot be imported: {error}", "add its folder to PYTHONPATH"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise InputError(
            FLAG,
            f"{path!r} is not a subclass of {Policy.__module__}.{Policy.__qualname__}",
            "derive the class from it",
        )
    return kind
