"""StateSnapshots: copies of states, from which requests with the same prefix start.

A state summarizes all tokens before it and cannot be rolled back. So at the end of a page, a
request's state is copied to a slot of its own, under the key of that page (prefix_cache.py). A
later request with the same tokens continues from the deepest copy whose pages are cached as well.
Copies are made:

- at the end of a prompt's last full page, which costs the prompt one more step;
- at the end of the pages that a prompt shares with earlier ones, for later requests;
- every SPACING tokens of long prompts and of outputs: only the newest of these per request.

A chunk that ends at such a position is noted when it is planned. Its state is copied before the
next step, when the host knows all its tokens (`settle`). The least recently used copy is evicted
first. With a host tier it is stored there, and a request that starts from it loads it into its own
slot.

A verification computes rows that may be rejected, and its start may be known only after it was
planned. Its slot can be read from any of its rows on (qkernels/causal_conv/state.py). So it is
copied where a page may end within it, and the copy gets its key, or is dropped, once it is known
which rows were accepted.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from qserve.engine.kv_cache.host_tier import HostTier, PageMoves
from qserve.engine.request import Request, Status

SPACING = 256  # tokens: that many are quickly recomputed
# Tokens that a copy must save, since a chunk that ends there adds a step.
LEAST_GAIN = 64


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoves:
    """Copies between state slots to make before a step, in this order.

    Evicted copies are stored on the host. The states that the previous step left in `saved_from`
    are saved. Then requests get the states that they start from: copies, those of other rows of a
    beam search, all of which are read first, and copies of the host.
    """

    stored_from: np.ndarray = field(default_factory=_none)  # int64
    stored_to: np.ndarray = field(default_factory=_none)  # on the host
    saved_from: np.ndarray = field(default_factory=_none)  # int64
    saved_to: np.ndarray = field(default_factory=_none)
    restored_from: np.ndarray = field(default_factory=_none)
    restored_to: np.ndarray = field(default_factory=_none)
    loaded_from: np.ndarray = field(default_factory=_none)  # on the host
    loaded_to: np.ndarray = field(default_factory=_none)

    def with_forks(self, forks: Mapping[int, int]) -> "StateMoves":
        """Return the moves with those of beams. `forks`: slot -> slot of the state that it gets."""
        targets = np.fromiter(forks.keys(), np.int64, len(forks))
        sources = np.fromiter(forks.values(), np.int64, len(forks))
        return replace(
            self,
            restored_from=np.concatenate([self.restored_from, sources]),
            restored_to=np.concatenate([self.restored_to, targets]),
        )

    @property
    def started(self) -> set[int]:
        """Slots of the requests that start from a copy."""
        return {*self.restored_to.tolist(), *self.loaded_to.tolist()}


class _Note(NamedTuple):
    """A chunk after which a state is saved."""

    request: Request
    slot: int  # the request's own at that time
    end: int  # number of tokens that the state covers
    is_kept: bool  # until it is evicted; otherwise until the request's next copy


class _VerifyNote(NamedTuple):
    """A verification within which a page may end."""

    request: Request
    slot: int
    start: int  # planned: too high by the rejected drafts of the step before it
    count: int
    is_certain: bool  # the start is right


class _UnkeyedCopy(NamedTuple):
    """A copy after a verification whose result is not known."""

    request: Request
    snapshot: int
    end: int


class StateSnapshots:
    """Allocates slots first_slot..first_slot + num_slots - 1."""

    def __init__(
        self, first_slot: int, num_slots: int, page_size: int, host: HostTier | None = None
    ) -> None:
        """`host`: receives evicted copies."""
        self.host = host
        self.first_slot, self.num_slots, self.page_size = first_slot, num_slots, page_size
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(first_slot, first_slot + num_slots))[::-1]
        self._notes: list[_Note] = []  # of the step that was planned last
        self._verify_notes: list[_VerifyNote] = []  # of the same step
        self._unkeyed: list[_UnkeyedCopy] = []  # of the step before it
        self._saves: dict[int, int] = {}  # snapshot's slot -> request's slot, before the next step
        self._restores: dict[int, int] = {}  # request's slot -> snapshot's

    def __len__(self) -> int:
        return len(self._slots)

    def has(self, key: bytes) -> bool:
        """Return whether there is a copy at the end of the page with this key."""
        return key in self._slots or (self.host is not None and key in self.host)

    def deepest(self, keys: Sequence[bytes]) -> int:
        """Number of pages up to the deepest copy; 0: there is none."""
        return next((n for n in range(len(keys), 0, -1) if self.has(keys[n - 1])), 0)

    def made(self, keys: Iterable[bytes]) -> list[tuple[bytes, int]]:
        """Keys that have a copy on the device, with its slot, once a step was launched with it."""
        found = [(key, self._slots[key]) for key in keys if key in self._slots]
        return [(key, slot) for key, slot in found if slot not in self._saves]

    def begin_(self, request: Request, num_found: int) -> None:
        """Restore the state of an admitted request, if there is a copy, and plan its copies.

        `num_found`: cached pages, including those beyond the copy.
        """
        start = request.last_snapshot = request.num_computed
        if start:
            self._start_from(request.page_keys[start // self.page_size - 1], request.state_slot)
        last = (request.num_tokens - 1) // self.page_size
        stops: list[int] = []
        for end in (num_found * self.page_size, last * self.page_size):
            if request.reads_cache and end - (stops or [start])[-1] >= LEAST_GAIN:
                stops.append(end)
        request.snapshots_at = tuple(stops)

    def _start_from(self, key: bytes, slot: int) -> None:
        """Restore a copy to a request's slot."""
        if key in self._slots:
            self._slots.move_to_end(key)
            self._restores[slot] = self._slots[key]
        else:
            self.host.keep([key])
            self.host.load(key, slot)

    def shorter(self, request: Request, start: int, count: int) -> int:
        """Shorten the next `count` tokens of a prompt to end the chunk where a copy is due."""
        end = start + count
        stop = next((each for each in request.snapshots_at if start < each <= end), None)
        if stop is None and end < request.num_tokens:
            stop = end // self.page_size * self.page_size
        return stop - start if stop is not None and stop > start else count

    def note(self, request: Request, end: int) -> None:
        """Note that a planned step computes a request up to `end`: save its state if it is due.

        Not of beams: the result of the step may give a row another beam's tokens.
        """
        if end % self.page_size or (request.beams is not None and request.beams.has_forked):
            return
        is_kept = end in request.snapshots_at
        if is_kept or end - request.last_snapshot >= SPACING:
            request.last_snapshot = end
            self._notes.append(_Note(request, request.state_slot, end, is_kept))

    def note_verify(self, request: Request, start: int, count: int) -> None:
        """Note a planned verification of `count` rows, or a row whose position may be too high.

        Call it before the rows count as pending.
        """
        num_uncertain = max(0, request.num_pending - 1)
        end = (start + count) // self.page_size * self.page_size
        if end > start - num_uncertain and end - request.last_snapshot >= SPACING:
            slot, is_certain = request.state_slot, not num_uncertain
            self._verify_notes.append(_VerifyNote(request, slot, start, count, is_certain))

    def settle(self, insert: Callable[[Request], None]) -> None:
        """Save the states of the step that was planned last, whose tokens are known by now.

        `insert` computes the keys of a running request's full pages.
        """
        unkeyed, self._unkeyed = self._unkeyed, []
        for request, snapshot, end in unkeyed:
            key = self._key(request, end, insert) if request.num_known > end else None
            if key is None or key in self._slots:
                self._saves.pop(snapshot, None)
                self._free.append(snapshot)
            else:
                self._replace(request, key, end)
                self._slots[key] = snapshot
        notes, self._notes = self._notes, []
        for request, slot, end, is_kept in notes:
            key = self._key(request, end, insert)
            if key is None:
                continue  # its tokens did not arrive, or they must not be shared
            self._save(request, slot, end, key, is_kept)
        verify_notes, self._verify_notes = self._verify_notes, []
        for note in verify_notes:
            self._settle_verify(note, insert)

    def _settle_verify(self, note: _VerifyNote, insert: Callable[[Request], None]) -> None:
        """Save the state of a verification at the first end of a page within it."""
        request, start = note.request, note.start
        if request.status is Status.RUNNING and request.num_pending >= note.count:  # in flight
            start = request.num_computed - note.count
        elif not note.is_certain:
            return
        end = (start // self.page_size + 1) * self.page_size
        if end > start + note.count or end - request.last_snapshot < SPACING:
            return
        # The first row has a token that was sampled before; others have drafts.
        if end == start + 1 or request.num_known > end:
            key = self._key(request, end, insert)
            if key is not None:
                self._save(request, note.slot, end, key, is_kept=False)
        elif request.status is Status.RUNNING and request.num_pending >= note.count:
            snapshot = self._take_slot()
            if snapshot is not None:
                self._saves[snapshot] = note.slot
                self._unkeyed.append(_UnkeyedCopy(request, snapshot, end))

    def _key(self, request: Request, end: int, insert: Callable[[Request], None]) -> bytes | None:
        """Key of a request's page that ends at `end`, or None."""
        if request.status is Status.RUNNING:
            insert(request)
        index = end // self.page_size - 1
        return request.page_keys[index] if index < len(request.page_keys) else None

    def _save(self, request: Request, slot: int, end: int, key: bytes, is_kept: bool) -> None:
        """Copy a request's state to a slot under the key of a page, unless there is a copy."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        if not is_kept:
            self._replace(request, key, end)
        snapshot = self._take_slot()
        if snapshot is not None:
            self._slots[key] = snapshot
            self._saves[snapshot] = slot

    def _replace(self, request: Request, key: bytes, end: int) -> None:
        """Drop a request's newest copy in favour of another."""
        self.drop([request.snapshot_key])
        request.snapshot_key, request.last_snapshot = key, end

    def _take_slot(self) -> int | None:
        """A free slot, or that of the least recently used copy.

        None: copies without keys have all slots.
        """
        if self._free:
            return self._free.pop()
        if not self._slots:
            return None
        key, snapshot = self._slots.popitem(last=False)
        # a copy that is not made yet is where it would be copied from
        source = self._saves.pop(snapshot, snapshot)
        if self.host is not None:
            self.host.store(key, source)
        return snapshot

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove the copies with these keys."""
        for key in keys:
            self._drop(key)
            if self.host is not None:
                self.host.drop(key)

    def _drop(self, key: bytes) -> None:
        """Remove a copy from the device."""
        snapshot = self._slots.pop(key, None)
        if snapshot is not None:
            self._saves.pop(snapshot, None)
            self._free.append(snapshot)

    def invalidate(self, request: Request) -> None:
        """Remove the copies of a request because they are invalid."""
        self._notes = [note for note in self._notes if note.request is not request]
        self._verify_notes = [note for note in self._verify_notes if note.request is not request]
        self._drop_unkeyed([copy for copy in self._unkeyed if copy.request is request])
        self.drop(request.page_keys)

    def drop_all(self) -> None:
        """Remove all copies. Planned restores still happen: nothing overwrites them first."""
        self._drop_of_device()
        if self.host is not None:
            self.host.drop_all()

    def doubt(self, moves: StateMoves | None) -> None:
        """Remove the copies of which it is unknown whether they were made."""
        self._drop_of_device()
        if moves is not None and self.host is not None:
            self.host.forget(moves.stored_to.tolist())

    def _drop_of_device(self) -> None:
        self._notes, self._verify_notes = [], []
        self._drop_unkeyed(list(self._unkeyed))
        for key in list(self._slots):
            self._drop(key)

    def _drop_unkeyed(self, copies: Collection[_UnkeyedCopy]) -> None:
        self._unkeyed = [copy for copy in self._unkeyed if copy not in copies]
        for copy in copies:
            self._saves.pop(copy.snapshot, None)
            self._free.append(copy.snapshot)

    def take_moves(self) -> StateMoves | None:
        """The copies to make before the next step, or None."""
        hosted = None if self.host is None else self.host.take_moves()
        if not self._saves and not self._restores and hosted is None:
            return None
        hosted = hosted or PageMoves()
        saves = np.array(list(self._saves.items()), np.int64).reshape(-1, 2)
        restores = np.array(list(self._restores.items()), np.int64).reshape(-1, 2)
        self._saves, self._restores = {}, {}
        return StateMoves(
            stored_from=hosted.stored_pages,
            stored_to=hosted.stored_slots,
            loaded_from=hosted.loaded_slots,
            loaded_to=hosted.loaded_pages,
            saved_from=saves[:, 1],
            saved_to=saves[:, 0],
            restored_from=restores[:, 1],
            restored_to=restores[:, 0],
        )

    def check_integrity(self) -> None:
        """Assert that each slot is free or has one copy."""
        unkeyed = [copy.snapshot for copy in self._unkeyed]
        slots = sorted([*self._slots.values(), *unkeyed, *self._free])
        if slots != list(range(self.first_slot, self.first_slot + self.num_slots)):
            raise AssertionError(f"snapshot slots lost or shared: {self._slots}, {self._free}")
