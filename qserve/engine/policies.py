"""Scheduling policies: who is admitted next, and whether a step holds prompts, decodes or both.

A policy knows requests and counts, no pages and no tensors. `--scheduling-policy` takes a row of
POLICIES, or "module:Class" (or "module.Class") for a class of the user's own: a subclass of Policy
that overrides what shall differ.
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

FLAG = "--scheduling-policy"
# Admissions that pass over higher priorities before one of those ages. One place in 65 is little to
# the lower ones, and as much as a background job needs to come to its end.
MAX_PASSES = 64
# Steps of prompts alone, one after the other, before one of decodes, under any policy: prompts that
# end with their first token could go on for ever.
MAX_PROMPT_STEPS = 64
# Looking for cached pages of more requests than this takes longer than it saves.
MAX_COMPARED = 128


class Phase(Enum):
    """What a step may hold."""

    MIXED = "mixed"  # a token of every running request, then chunks of prompts
    PROMPTS = "prompts"  # chunks of prompts alone; decodes where there are none
    DECODES = "decodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a policy may look at before a step is planned."""

    num_waiting: int
    num_running: int
    num_prompts_begun: int  # of the running ones, those whose prompt is not computed yet


class Policy:
    """First come, first served, in turns of clients and of their API requests; steps are mixed.

    This is the row `fcfs`. The scheduler asks in this order: `level` and `turn` when a request
    comes, `phase` and `most_admitted` once a step, `order` for each admission.
    """

    # Admissions that may pass over higher levels before the oldest request of those joins the level
    # of the last one, for good.
    max_passes: float = MAX_PASSES

    def __init__(self, *, prefill_batch_size: int = 1) -> None:
        self.prefill_batch_size = prefill_batch_size

    def level(self, request: Request) -> Any:
        """Requests of a lower level go before all of a higher one, and may take their places."""
        return 0

    def turn(self, request: Request) -> tuple[str, str]:
        """Client and group: clients take turns, and so do the groups of each."""
        return request.client, request.group

    def phase(self, counts: Counts) -> Phase:
        """What the next step may hold."""
        return Phase.MIXED

    def most_admitted(self, counts: Counts) -> float:
        """How many requests the next step may admit; called once a step, after `phase`."""
        return math.inf

    def admitted(self, request: Request) -> None:
        """A request was admitted to the step that is being planned."""

    def order(
        self, candidates: Iterator[Request], num_cached: Callable[[Request], int]
    ) -> Iterable[Request]:
        """Whom to try first: `candidates` are the first of each group, in turn.

        `num_cached` tells how many tokens of a request need not be computed now. The scheduler
        offers only the oldest candidate where it has been passed over too often.
        """
        return candidates


class Priority(Policy):
    """Lower numbers first, whenever they come; within a number as fcfs. What waits ages."""

    def level(self, request: Request) -> Any:
        return request.priority


class PrefillFirst(Policy):
    """Prompts whenever there are any, then decodes: the least time to the first token, but running
    requests wait. As vLLM did before its version 1."""

    def phase(self, counts: Counts) -> Phase:
        return Phase.PROMPTS


class LongestPrefix(Policy):
    """Whose prompt is in the cache for the longest part goes first, whichever request it is of."""

    def turn(self, request: Request) -> tuple[str, str]:
        return request.client, request.request_id

    def order(
        self, candidates: Iterator[Request], num_cached: Callable[[Request], int]
    ) -> Iterable[Request]:
        compared = list(islice(candidates, MAX_COMPARED))
        yield from sorted(compared, key=num_cached, reverse=True)
        yield from candidates


class Controlled(Policy):
    """One phase at a time: `prefill_batch_size` prompts together, then decodes, to study each.

    The next prompts are taken when so many wait, or when nothing runs any more.
    """

    def __init__(self, *, prefill_batch_size: int = 1) -> None:
        super().__init__(prefill_batch_size=prefill_batch_size)
        self._num_left = 0  # of the batch that is being admitted

    def phase(self, counts: Counts) -> Phase:
        if not self._num_left and not counts.num_prompts_begun:
            enough = counts.num_waiting >= self.prefill_batch_size
            if counts.num_waiting and (enough or not counts.num_running):
                self._num_left = min(self.prefill_batch_size, counts.num_waiting)
        self._num_left = min(self._num_left, counts.num_waiting)
        return Phase.PROMPTS if self._num_left or counts.num_prompts_begun else Phase.DECODES

    def most_admitted(self, counts: Counts) -> float:
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
    """The policy of a row, or of a dotted path. Raises InputError."""
    kind = POLICIES.get(name) or _load(name)
    return kind(prefill_batch_size=prefill_batch_size)


def _load(path: str) -> type[Policy]:
    module, _, name = path.replace(":", ".").rpartition(".")
    expected = f"expected one of {', '.join(POLICIES)}, or module:Class"
    if not module:
        raise InputError(FLAG, f"{expected}, found {path!r}")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            FLAG, f"{path!r} cannot be imported: {error}", "add its folder to PYTHONPATH"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise InputError(
            FLAG, f"{path!r} is no subclass of {Policy.__module__}.{Policy.__qualname__}"
        )
    return kind
