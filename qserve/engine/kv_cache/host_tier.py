"""HostTier: keeps pages that were evicted from the device in host memory.

HostTier maps keys to host slots and collects the copies to make; page_copies.py makes them. State
snapshots have a second HostTier, whose pages are state slots.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMoves:
    """Page copies to make before a step: stores, then copies, then loads. Pairs have one index.

    If a slot is both stored and loaded, the load reads what this step stored there.
    """

    stored_pages: np.ndarray = field(default_factory=_none)  # int64; page of the device ->
    stored_slots: np.ndarray = field(default_factory=_none)  # int64; slot of the host
    copied_from: np.ndarray = field(default_factory=_none)  # page of the device -> another;
    copied_to: np.ndarray = field(default_factory=_none)  # all are read before any is written
    loaded_slots: np.ndarray = field(default_factory=_none)  # slot of the host ->
    loaded_pages: np.ndarray = field(default_factory=_none)  # page of the device


class HostTier:
    """Holds up to `num_slots` pages on the host. The least recently used page is evicted first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots))
        # copies to make before the next step
        self._stores: dict[int, int] = {}  # slot -> page
        self._loads: list[tuple[int, int]] = []  # slot, page
        self._loading: set[int] = set()  # slots to load from, which must not be overwritten yet
        self._dropped: list[int] = []  # slots of _loading that become free after the next step
        self._num_reserved = 0  # number of slots that are being filled from outside
        self.num_loaded = 0  # total number of loaded pages

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading `keys` that this tier holds."""
        for count, key in enumerate(keys):
            if key not in self._slots:
                return count
        return len(keys)

    def store(self, key: bytes, page: int) -> None:
        """Store a page that is being evicted from the device."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is not None:
            self._slots[key] = slot
            self._stores[slot] = page

    def keep(self, keys: Sequence[bytes]) -> None:
        """Protect these pages from eviction until the next step has loaded them."""
        for key in keys:
            self._slots.move_to_end(key)
            self._loading.add(self._slots[key])

    def load(self, key: bytes, page: int) -> None:
        """Copy a page from the host to the device. The host keeps its page."""
        self._loads.append((self._slots[key], page))
        self.num_loaded += 1

    def reserve(self, count: int, keep: Sequence[bytes] = ()) -> list[int]:
        """Reserve up to `count` slots that are filled from outside, independently of steps.

        The keys in `keep` are not evicted for these slots. The caller must pass each slot to
        `fill` or to `give_up`.
        """
        for key in keep:
            self._slots.move_to_end(key)
        count = min(count, self.num_slots // 2 - self._num_reserved, self.num_slots - len(keep))
        slots = []
        while len(slots) < count:
            slot = self._free.pop() if self._free else self._evict()
            if slot is None:
                break
            self._stores.pop(slot, None)  # the page to be stored there has just been evicted
            slots.append(slot)
        self._num_reserved += len(slots)
        return slots

    def fill(self, key: bytes, slot: int) -> None:
        """Insert the page of a reserved slot."""
        self._num_reserved -= 1
        if key in self._slots:  # the same page was stored in the meantime
            self._free.append(slot)
        else:
            self._slots[key] = slot

    def give_up(self, slot: int) -> None:
        self._num_reserved -= 1
        self._free.append(slot)

    def drop(self, key: bytes) -> None:
        """Remove a key and free its slot."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            (self._dropped if slot in self._loading else self._free).append(slot)

    def forget(self, slots: Collection[int]) -> None:
        """Remove the keys of slots whose contents are undefined."""
        undefined = set(slots)
        for key in [key for key, slot in self._slots.items() if slot in undefined]:
            self.drop(key)

    def drop_all(self) -> None:
        for key in list(self._slots):
            self.drop(key)

    def take_moves(self) -> PageMoves | None:
        """Return the copies to make before the next step, or None."""
        if not self._stores and not self._loads:
            return None
        stored = np.array(list(self._stores.items()), np.int64).reshape(-1, 2)
        loaded = np.array(self._loads, np.int64).reshape(-1, 2)
        self._stores, self._loads = {}, []
        self._loading.clear()
        self._free += self._dropped
        self._dropped = []
        return PageMoves(
            stored_pages=stored[:, 1],
            stored_slots=stored[:, 0],
            loaded_slots=loaded[:, 0],
            loaded_pages=loaded[:, 1],
        )

    def _evict(self) -> int | None:
        """Evict the least recently used page that is not being loaded. Returns its slot."""
        for key, slot in self._slots.items():
            if slot not in self._loading:
                return self._slots.pop(key)
        return None
