"""StateSnapshots: copies of states that requests with the same start begin from. Knows no contents.

A state stands for all tokens before it and cannot go back. So where a page ends, a request's state
is copied to a slot of its own, under the key of that page (prefix_keys.py): a later request with
the same tokens goes on from the deepest copy whose pages are still there, too. Copies are made

- where a prompt's full pages end, which costs the prompt one more step,
- where the pages end that a prompt shares with earlier ones, for the next with that start,
- every SPACING tokens of long prompts and of outputs: of each request the newest of these alone.

A chunk that ends there is noted when it is planned. Its state is copied before the next step, when
the host knows all its tokens (`settle`). The copy asked for least recently goes first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from qserve.engine.request import Request, Status

SPACING = 256  # tokens: that many are computed again in a moment
# Tokens that a copy must save: a chunk that ends there is a step more.
LEAST_GAIN = 64


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoves:
    """Copies between state slots that come before a step: first those that keep states.

    What the step before left in `saved_from` is kept; then requests get what they begin from.
    """

    saved_from: np.ndarray = field(default_factory=_none)  # int64
    saved_to: np.ndarray = field(default_factory=_none)
    restored_from: np.ndarray = field(default_factory=_none)
    restored_to: np.ndarray = field(default_factory=_none)


class _Note(NamedTuple):
    """A chunk after which a state is to be kept."""

    request: Request
    slot: int  # the request's own, also where it has lost it meanwhile
    end: int  # tokens that the state stands for
    is_kept: bool  # until others push it out; else until the request's next one


class StateSnapshots:
    """Hands out slots first_slot..first_slot + num_slots - 1."""

    def __init__(self, first_slot: int, num_slots: int, page_size: int) -> None:
        self.first_slot, self.num_slots, self.page_size = first_slot, num_slots, page_size
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the last asked for last
        self._free = list(range(first_slot, first_slot + num_slots))[::-1]
        self._notes: list[_Note] = []  # of the step that was planned last
        self._saves: dict[int, int] = {}  # snapshot's slot -> request's, before the next step
        self._restores: dict[int, int] = {}  # request's slot -> snapshot's

    def __len__(self) -> int:
        return len(self._slots)

    def has(self, key: bytes) -> bool:
        """Whether there is a copy behind the page with this key."""
        return key in self._slots

    def deepest(self, keys: Sequence[bytes]) -> int:
        """Of pages with these keys, how many stand before the deepest copy; 0: there is none."""
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self._slots:
                return count
        return 0

    def begin_(self, request: Request, num_found: int) -> None:
        """An admitted request has its state slot and its pages: fill the slot, if it may be.

        `num_found`: pages whose contents were there, also beyond its copy.
        """
        start = request.last_snapshot = request.num_computed
        if start:
            key = request.page_keys[start // self.page_size - 1]
            self._slots.move_to_end(key)
            self._restores[request.state_slot] = self._slots[key]
        last = (request.num_tokens - 1) // self.page_size
        stops: list[int] = []
        for end in (num_found * self.page_size, last * self.page_size):
            if request.reads_cache and end - (stops or [start])[-1] >= LEAST_GAIN:
                stops.append(end)
        request.snapshots_at = tuple(stops)

    def shorter(self, request: Request, start: int, count: int) -> int:
        """How many of the next `count` tokens of a prompt a step computes, to end where it may."""
        end = start + count
        stop = next((each for each in request.snapshots_at if start < each <= end), None)
        if stop is None and end < request.num_tokens:
            stop = end // self.page_size * self.page_size
        return stop - start if stop is not None and stop > start else count

    def note(self, request: Request, end: int) -> None:
        """A step was planned that computes a request up to `end`: keep its state, if it is due."""
        if end % self.page_size:
            return
        is_kept = end in request.snapshots_at
        if is_kept or end - request.last_snapshot >= SPACING:
            request.last_snapshot = end
            self._notes.append(_Note(request, request.state_slot, end, is_kept))

    def settle(self, publish: Callable[[Request], None]) -> None:
        """Keep the states of the step that was planned last, whose tokens are known by now.

        `publish` makes the keys of a running request's full pages.
        """
        notes, self._notes = self._notes, []
        for request, slot, end, is_kept in notes:
            if request.status is Status.RUNNING:
                publish(request)
            index = end // self.page_size - 1
            if index >= len(request.page_keys):
                continue  # its tokens did not come, or they are nobody else's business
            key = request.page_keys[index]
            if key in self._slots:
                self._slots.move_to_end(key)
                continue
            if not is_kept:
                self.drop([request.snapshot_key])
                request.snapshot_key = key
            place = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._slots[key] = place
            self._saves[place] = slot

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget the copies with these keys."""
        for key in keys:
            place = self._slots.pop(key, None)
            if place is not None:
                self._saves.pop(place, None)
                self._free.append(place)

    def withdraw(self, request: Request) -> None:
        """Forget what a request left: it is wrong."""
        self._notes = [note for note in self._notes if note.request is not request]
        self.drop(request.page_keys)

    def drop_all(self) -> None:
        """Forget all. Requests that begin from a copy go on: nothing is overwritten before."""
        self._notes = []
        self.drop(list(self._slots))

    def take_moves(self) -> StateMoves | None:
        """What to copy before the next step; None: nothing."""
        if not self._saves and not self._restores:
            return None
        saves = np.array(list(self._saves.items()), np.int64).reshape(-1, 2)
        restores = np.array(list(self._restores.items()), np.int64).reshape(-1, 2)
        self._saves, self._restores = {}, {}
        return StateMoves(
            saved_from=saves[:, 1],
            saved_to=saves[:, 0],
            restored_from=restores[:, 1],
            restored_to=restores[:, 0],
        )

    def check_integrity(self) -> None:
        """Assert that each slot is free, or has one copy."""
        slots = sorted([*self._slots.values(), *self._free])
        if slots != list(range(self.first_slot, self.first_slot + self.num_slots)):
            raise AssertionError(f"snapshot slots lost or shared: {self._slots}, {self._free}")
