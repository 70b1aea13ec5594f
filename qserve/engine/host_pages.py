"""Pages in the host's memory: what the device had no room for any more. Knows no contents.

Which key lies in which slot, and what has to be copied. The copies themselves are page_copies.py's.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMoves:
    """Copies that come before a step, in this order. Page and slot of equal index belong together.

    No slot is in both: what a step loads is not overwritten by what it stores.
    """

    stored_pages: np.ndarray  # int64, on the device
    stored_slots: np.ndarray  # int64, of the host
    loaded_slots: np.ndarray
    loaded_pages: np.ndarray


class HostPages:
    """`num_slots` pages beside the pool; those that nobody asked for longest go first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots))
        # since the last step
        self._stores: dict[int, int] = {}  # slot -> page
        self._loads: list[tuple[int, int]] = []  # slot, page
        self._loading: set[int] = set()  # slots that nothing may be stored in yet
        self._dropped: list[int] = []  # those of them that are free afterwards
        self.num_stored = self.num_loaded = 0  # pages, so far

    def __len__(self) -> int:
        return len(self._slots)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` are here, up to the first that is not."""
        for count, key in enumerate(keys):
            if key not in self._slots:
                return count
        return len(keys)

    def store(self, key: bytes, page: int) -> None:
        """Keep a page that is about to be taken for something else."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is not None:
            self._slots[key] = slot
            self._stores[slot] = page
            self.num_stored += 1

    def keep(self, keys: Sequence[bytes]) -> None:
        """Let nothing be stored in their place before the next step has loaded them."""
        for key in keys:
            self._slots.move_to_end(key)
            self._loading.add(self._slots[key])

    def load(self, key: bytes, page: int) -> None:
        """Fill a page of the device with what is here, which stays."""
        self._loads.append((self._slots[key], page))
        self.num_loaded += 1

    def drop(self, key: bytes) -> None:
        """Forget what a key stands for."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            (self._dropped if slot in self._loading else self._free).append(slot)

    def drop_all(self) -> None:
        for key in list(self._slots):
            self.drop(key)

    def take_moves(self) -> PageMoves | None:
        """What to copy before the next step; None: nothing."""
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
        """The slot of what was asked for least recently, but not of what is being loaded."""
        for key, slot in self._slots.items():
            if slot not in self._loading:
                return self._slots.pop(key)
        return None
