"""SharedPages: the leader's access to KV pages that are sharded over all ranks.

A page can be loaded if every rank has its shard, and is loaded once every rank has loaded it. Only
the thread that launches steps may call the methods, so that calls and steps reach each rank in the
same order.
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
    """The ranks other than the leader. RankGroup of the engine implements this."""

    def begin(self, name: str, *values: Any) -> list[Future]:
        """Start a call on each rank. Returns the futures of the results."""


class SharedPages:
    """KV pages, or state snapshots, of all ranks of an engine."""

    def __init__(
        self,
        ours: RankPages,
        rank_group: OtherRanks | None,
        page_bytes: Sequence[int],
        kind: str = "pages",
    ) -> None:
        """`ours`: the leader's pages. `rank_group`: the other ranks; None: one rank.

        `page_bytes`: bytes of a page's shard on each rank. `kind`: "pages" or "states", which is
        part of the names of the ranks' calls.
        """
        self._ours, self._rank_group, self.page_bytes = ours, rank_group, tuple(page_bytes)
        self._kind = kind

    def match(self, keys: Sequence[bytes]) -> Future:
        """Count the leading pages that can be loaded."""
        return self._begin("match", min, 0, _array(keys))

    def deepest(self, keys: Sequence[bytes]) -> Future:
        """Count the keys up to the last one whose page can be loaded."""
        return self._begin("deepest", min, 0, _array(keys))

    def load(self, keys: Sequence[bytes], slots: Sequence[int]) -> Future:
        """Fill reserved slots. The future's result says for each slot if it was loaded."""
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
    """Return, for each page, True if all ranks have loaded it."""
    return [all(of_ranks) for of_ranks in zip(*loaded, strict=True)]


def merged(futures: Sequence[Future], merge: Callable[[list[Any]], Any], miss: Any) -> Future:
    """Return a future for the merged results of all futures. `miss`: result of a failed future."""
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
