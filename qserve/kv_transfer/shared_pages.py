"""SharedPages: the leader's access to KV pages that are sharded over all ranks.

A page can be loaded if every rank has its shard, and is loaded once every rank has loaded it. Only
the thread that launches steps calls the methods: calls reach each rank in the order of its steps.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from qserve.kv_transfer.rank_pages import RankPages

KEY_BYTES = 32

logger = logging.getLogger(__name__)


class OtherRanks(Protocol):
    """Ranks of the model other than the leader (engine: RankGroup)."""

    def begin(self, name: str, *values: Any) -> list[Future]:
        """Start a call on each rank. Returns the future results."""


class SharedPages:
    """KV pages of one engine's ranks, or snapshots of their states."""

    def __init__(
        self,
        ours: RankPages,
        rank_group: OtherRanks | None,
        page_bytes: Sequence[int],
        kind: str = "pages",
    ) -> None:
        """`rank_group`: None with one rank. `page_bytes`: bytes of each rank's shard.

        `kind`: pages or states, as ranks name their calls.
        """
        self._ours, self._rank_group, self.page_bytes = ours, rank_group, tuple(page_bytes)
        self._kind = kind

    def match(self, keys: Sequence[bytes]) -> Future:
        """Number of pages that can be loaded, up to the first that cannot."""
        return self._begin("match", min, 0, _array(keys))

    def deepest(self, keys: Sequence[bytes]) -> Future:
        """Number of keys up to the last whose page can be loaded."""
        return self._begin("deepest", min, 0, _array(keys))

    def load(self, keys: Sequence[bytes], slots: Sequence[int]) -> Future:
        """Fill reserved slots. The future returns for each slot if it was loaded."""
        nothing = [False] * len(keys)
        return self._begin("load", in_all, nothing, _array(keys), list(slots))

    def save(self, keys: Sequence[bytes], pages: Sequence[int]) -> Future:
        """Save pages as they are after all launched work."""
        return self._begin("save", lambda _: None, None, _array(keys), list(pages))

    def _begin(
        self, name: str, merge: Callable[[list[Any]], Any], miss: Any, *values: Any
    ) -> Future:
        """Start a call on all ranks. `miss`: the result of a rank that failed."""
        theirs = (
            []
            if self._rank_group is None
            else self._rank_group.begin(f"{name}_{self._kind}", *values)
        )
        ours = getattr(self._ours, name)(*values)
        return ours if not theirs else merged([ours, *theirs], merge, miss)


def _array(keys: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)


def in_all(loaded: list[list[bool]]) -> list[bool]:
    """For each page, whether all ranks have loaded it."""
    return [all(of_ranks) for of_ranks in zip(*loaded, strict=True)]


def merged(futures: Sequence[Future], merge: Callable[[list[Any]], Any], miss: Any) -> Future:
    """Merge the results of all futures once the last is done."""
    whole: Future = Future()
    left, lock = len(futures), threading.Lock()

    def note(_: Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        results = []
        for future in futures:
            error = future.exception()
            if error is not None:
                logger.warning("KV pages of a rank are missing: %s", error)
            results.append(miss if error is not None else future.result())
        whole.set_result(merge(results))

    for future in futures:
        future.add_done_callback(note)
    return whole
