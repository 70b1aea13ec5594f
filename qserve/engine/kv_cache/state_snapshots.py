"""StateSnapshots: copies of recurrent states, from which requests with the same prefix start.

A state summarizes all tokens before it and cannot be rolled back. So at the end of a page, the
state of a request is copied to a separate slot, under the key of that page (prefix_cache.py). A
later request with the same tokens starts from the deepest copy whose pages are cached too.
Copies are made:

- at the end of a prompt's last full page, which costs the prompt one more step;
- at the end of the pages that a prompt shares with earlier prompts, for later requests;
- every SPACING tokens of long prompts and of outputs; a request keeps only the newest of these.

A chunk that ends at such a position is noted when it is planned. Its state is copied before the
next step, when the host knows all its tokens (`settle`). The least recently used copy is evicted
first. If there is a host tier, the evicted copy is stored there, and a request that starts from it
loads it into the request's slot.

A verification computes rows that may be rejected, and its start may become known only after it was
planned. Its slot holds the state after each of its rows (qkernels/causal_conv/state.py). If a page
may end within the verification, the slot is copied. When the accepted rows are known, the copy gets
its key or is dropped.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from qserve.engine.kv_cache.host_tier import HostTier, PageMoves
from qserve.engine.request import Request, Status

SPACING = 256  # tokens between copies; recomputing fewer tokens takes little time
# A copy is made only if it saves at least this many tokens, since ending a chunk there costs one
# more step.
MIN_GAIN = 64


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoves:
    """Copies between state slots to make before a step, in this order.

    - stored: evicted snapshots, to the host;
    - saved: states of requests, as the previous step left them, to snapshots;
    - restored: snapshots, or states of other beams, to the slots of requests. All sources are read
      before any target is written;
    - loaded: snapshots on the host, to the slots of requests.
    """

    stored_from: np.ndarray = field(default_factory=_none)  # all arrays are int64
    stored_to: np.ndarray = field(default_factory=_none)  # host slots
    saved_from: np.ndarray = field(default_factory=_none)
    saved_to: np.ndarray = field(default_factory=_none)
    restored_from: np.ndarray = field(default_factory=_none)
    restored_to: np.ndarray = field(default_factory=_none)
    loaded_from: np.ndarray = field(default_factory=_none)  # host slots
    loaded_to: np.ndarray = field(default_factory=_none)

    def with_forks(self, forks: Mapping[int, int]) -> "StateMoves":
        """Return these copies plus those between beams. `forks`: target slot -> source slot."""
        targets = np.fromiter(forks.keys(), np.int64, len(forks))
        sources = np.fromiter(forks.values(), np.int64, len(forks))
        return replace(
            self,
            restored_from=np.concatenate([self.restored_from, sources]),
            restored_to=np.concatenate([self.restored_to, targets]),
        )

    @property
    def started(self) -> set[int]:
        """Slots of requests that start from a copied state."""
        return {*self.restored_to.tolist(), *self.loaded_to.tolist()}


class _Note(NamedTuple):
    """A planned chunk after which the request's state is saved."""

    request: Request
    slot: int  # the request's slot at that time
    end: int  # number of tokens that the state covers
    is_kept: bool  # True: keep until evicted; False: until the request's next copy


class _VerifyNote(NamedTuple):
    """A planned verification within which a page may end."""

    request: Request
    slot: int
    start: int  # planned start; too high by the number of drafts that the previous step rejects
    count: int
    is_certain: bool  # True: no drafts are in flight, so the start is exact


class _UnkeyedCopy(NamedTuple):
    """A copy made after a verification whose result is not known yet."""

    request: Request
    snapshot: int
    end: int


class StateSnapshots:
    """The copies of an engine, in slots `first_slot` to `first_slot + num_slots - 1`."""

    def __init__(
        self, first_slot: int, num_slots: int, page_size: int, host: HostTier | None = None
    ) -> None:
        """`host`: receives evicted copies."""
        self.host = host
        self.first_slot, self.num_slots, self.page_size = first_slot, num_slots, page_size
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(first_slot, first_slot + num_slots))[::-1]
        self._notes: list[_Note] = []  # from the step that was planned last
        self._verify_notes: list[_VerifyNote] = []  # from the same step
        self._unkeyed: list[_UnkeyedCopy] = []  # from the step before it
        self._reserved: set[int] = set()  # slots that are filled from outside
        # copies that were filled from outside for a request, which may still wait
        self._awaited: dict[bytes, Request] = {}
        # copies to make before the next step
        self._saves: dict[int, int] = {}  # slot of a snapshot -> slot of a request
        self._restores: dict[int, int] = {}  # slot of a request -> slot of a snapshot

    def __len__(self) -> int:
        return len(self._slots)

    def has(self, key: bytes) -> bool:
        """Return True if a copy exists for the end of the page with this key."""
        return key in self._slots or (self.host is not None and key in self.host)

    def deepest(self, keys: Sequence[bytes]) -> int:
        """Number of pages up to the deepest copy; 0 if there is no copy."""
        return next((n for n in range(len(keys), 0, -1) if self.has(keys[n - 1])), 0)

    def made(self, keys: Iterable[bytes]) -> list[tuple[bytes, int]]:
        """Return (key, slot) of the copies that are on the device, made by launched steps."""
        found = [(key, self._slots[key]) for key in keys if key in self._slots]
        return [(key, slot) for key, slot in found if slot not in self._saves]

    def reserve(self) -> int | None:
        """Take a slot that is filled from outside, independently of steps.

        Evicts the least recently used copy if needed; it is not stored on the host. The caller must
        pass the slot to `fill` or to `give_up`. Returns None if no slot can be taken.
        """
        if len(self._reserved) >= max(1, self.num_slots // 2):
            return None
        # A planned restore reads its slot only when the next step is launched.
        read = set(self._restores.values())
        slot = next((each for each in reversed(self._free) if each not in read), None)
        if slot is None:
            key = self._oldest(read)
            if key is None:
                return None
            slot = self._slots[key]
            self._drop(key)
        self._free.remove(slot)
        self._reserved.add(slot)
        return slot

    def fill(self, key: bytes, slot: int, request: Request) -> None:
        """Insert the copy in a reserved slot. It is not evicted while `request` waits."""
        self._reserved.remove(slot)
        self._awaited[key] = request
        if key in self._slots:  # the same copy was made in the meantime
            self._free.append(slot)
        else:
            self._slots[key] = slot

    def give_up(self, slot: int) -> None:
        """Free a reserved slot."""
        self._reserved.remove(slot)
        self._free.append(slot)

    def begin_(self, request: Request, num_found: int) -> None:
        """Restore the state of an admitted request if it reuses pages, and plan its copies.

        `num_found`: number of cached pages, including pages beyond the deepest copy.
        """
        start = request.last_snapshot = request.num_computed
        if start:
            self._start_from(request.page_keys[start // self.page_size - 1], request.state_slot)
        last = (request.num_tokens - 1) // self.page_size
        stops: list[int] = []
        for end in (num_found * self.page_size, last * self.page_size):
            if request.reads_cache and end - (stops or [start])[-1] >= MIN_GAIN:
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
        """Return `count`, or less so that a prompt's chunk ends where a copy is due."""
        end = start + count
        stop = next((each for each in request.snapshots_at if start < each <= end), None)
        if stop is None and end < request.num_tokens:
            stop = end // self.page_size * self.page_size
        return stop - start if stop is not None and stop > start else count

    def note(self, request: Request, end: int) -> None:
        """Record that a planned step computes a request up to `end`; its state is saved if due.

        States of beams are not saved: the step's result may give a row another beam's tokens.
        """
        if end % self.page_size or (request.beams is not None and request.beams.has_forked):
            return
        is_kept = end in request.snapshots_at
        if is_kept or end - request.last_snapshot >= SPACING:
            request.last_snapshot = end
            self._notes.append(_Note(request, request.state_slot, end, is_kept))

    def note_verify(self, request: Request, start: int, count: int) -> None:
        """Record a planned verification of `count` rows, or a row whose position may be too high.

        Call this before the rows count as pending.
        """
        num_uncertain = max(0, request.num_pending - 1)
        end = (start + count) // self.page_size * self.page_size
        if end > start - num_uncertain and end - request.last_snapshot >= SPACING:
            slot, is_certain = request.state_slot, not num_uncertain
            self._verify_notes.append(_VerifyNote(request, slot, start, count, is_certain))

    def settle(self, insert: Callable[[Request], None]) -> None:
        """Save the states of the step that was planned last. Its tokens are known by now.

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
                continue  # the tokens did not arrive, or the pages must not be shared
            self._save(request, slot, end, key, is_kept)
        verify_notes, self._verify_notes = self._verify_notes, []
        for note in verify_notes:
            self._settle_verify(note, insert)

    def _settle_verify(self, note: _VerifyNote, insert: Callable[[Request], None]) -> None:
        """Save the state at the first page end within a verification."""
        request, start = note.request, note.start
        if request.status is Status.RUNNING and request.num_pending >= note.count:  # in flight
            start = request.num_computed - note.count
        elif not note.is_certain:
            return
        end = (start // self.page_size + 1) * self.page_size
        if end > start + note.count or end - request.last_snapshot < SPACING:
            return
        # The first row has a token that was sampled before; the other rows have drafts.
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
        """Return the key of the page that ends at `end`, or None if it has no key."""
        if request.status is Status.RUNNING:
            insert(request)
        index = end // self.page_size - 1
        return request.page_keys[index] if index < len(request.page_keys) else None

    def _save(self, request: Request, slot: int, end: int, key: bytes, is_kept: bool) -> None:
        """Copy a request's state under the key of a page, unless such a copy exists."""
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
        """Drop a request's newest copy, because the copy at `end` replaces it."""
        self.drop([request.snapshot_key])
        request.snapshot_key, request.last_snapshot = key, end

    def _take_slot(self) -> int | None:
        """Take a free slot, or evict the least recently used copy and take its slot.

        Returns None if copies that must not be evicted occupy all slots.
        """
        if self._free:
            return self._free.pop()
        key = self._oldest()
        if key is None:
            return None
        snapshot = self._slots.pop(key)
        # If the copy is not made yet, its state is still in the slot that it would be copied from.
        source = self._saves.pop(snapshot, snapshot)
        if self.host is not None:
            self.host.store(key, source)
        return snapshot

    def _oldest(self, excluded: Collection[int] = ()) -> bytes | None:
        """Return the key of the least recently used copy that may be evicted.

        `excluded`: slots of copies that may not.
        """
        if self._awaited:
            for key, request in list(self._awaited.items()):
                if request.status is not Status.WAITING or key not in self._slots:
                    del self._awaited[key]
        for key, slot in self._slots.items():
            if slot not in excluded and key not in self._awaited:
                return key
        return None

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
        """Remove all copies. Planned restores still run: their sources are intact until then."""
        self._drop_of_device()
        if self.host is not None:
            self.host.drop_all()

    def invalidate_moves(self, moves: StateMoves | None) -> None:
        """Remove the copies that may not have been made."""
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
        """Return the copies to make before the next step, or None."""
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
        """Assert that each slot is free, is reserved or has one copy."""
        unkeyed = [copy.snapshot for copy in self._unkeyed]
        slots = sorted([*self._slots.values(), *unkeyed, *self._reserved, *self._free])
        if slots != list(range(self.first_slot, self.first_slot + self.num_slots)):
            raise AssertionError(f"snapshot slots lost or shared: {self._slots}, {self._free}")
