"""HostTier: pages evicted from the device, kept in host memory.

It maps keys to slots and collects the copies to make, which page_copies.py executes. Copies of
states have a tier of their own, whose pages are slots of states.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMoves:
    """Copies to make before a step, in this order. Entries of equal index belong together.

    A slot that is both stored and loaded is loaded with what this step stored there, never the
    reverse.
    """

    stored_pages: np.ndarray = field(default_factory=_none)  # int64, on the device
    stored_slots: np.ndarray = field(default_factory=_none)  # int64, on the host
    copied_from: np.ndarray = field(default_factory=_none)  # on the device; all are read before
    copied_to: np.ndarray = field(default_factory=_none)  # any of these is written
    loaded_slots: np.ndarray = field(default_factory=_none)
    loaded_pages: np.ndarray = field(default_factory=_none)


class HostTier:
    """`num_slots` pages on the host; the least recently used are evicted first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots))
        # since the last step
        self._stores: dict[int, int] = {}  # slot -> page
        self._loads: list[tuple[int, int]] = []  # slot, page
        self._loading: set[int] = set()  # slots that must not be overwritten yet
        self._dropped: list[int] = []  # those of them that become free afterwards
        self._num_reserved = 0  # slots that are being filled from elsewhere
        self.num_loaded = 0  # total number of loaded pages

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading `keys` that are here."""
        for count, key in enumerate(keys):
            if key not in self._slots:
                return count
        return len(keys)

    def store(self, key: bytes, page: int) -> None:
        """Keep a page that is being evicted from the device."""
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
        """Copy a page of the host, which stays here, to a page of the device."""
        self._loads.append((self._slots[key], page))
        self.num_loaded += 1

    def reserve(self, count: int, beside: Sequence[bytes] = ()) -> list[int]:
        """Reserve up to `count` slots to fill from elsewhere, outside of steps.

        The keys in `beside` are not evicted for them. Each slot is passed to `fill` or to
        `give_up`.
        """
        for key in beside:
            self._slots.move_to_end(key)
        count = min(count, self.num_slots // 2 - self._num_reserved, self.num_slots - len(beside))
        slots = []
        while len(slots) < count:
            slot = self._free.pop() if self._free else self._evict()
            if slot is None:
                break
            self._stores.pop(slot, None)  # the page that was to be stored there has been evicted
            slots.append(slot)
        self._num_reserved += len(slots)
        return slots

    def fill(self, key: bytes, slot: int) -> None:
        """Insert the page of a reserved slot."""
        self._num_reserved -= 1
        if key in self._slots:  # it was stored in the meantime
            self._free.append(slot)
        else:
            self._slots[key] = slot

    def give_up(self, slot: int) -> None:
        self._num_reserved -= 1
        self._free.append(slot)

    def drop(self, key: bytes) -> None:
        """Remove a key."""
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
        """The copies to make before the next step, or None."""
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
        """The slot of the least recently used page that is not being loaded."""
        for key, slot in self._slots.items():
            if slot not in self._loading:
                return self._slots.pop(key)
        return None
