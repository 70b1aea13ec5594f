"""SharedPages: the leader's way to the KV pages that all ranks have parts of. Knows no requests.

A page is there when every rank has its part, and loaded when every rank has loaded it. All methods
are for the thread that launches steps: calls come to each rank in the order of its steps.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from qserve.engine.crew import Crew
from qserve.kv_transfer.rank_pages import RankPages

logger = logging.getLogger(__name__)


class SharedPages:
    """Of one engine's ranks."""

    def __init__(self, ours: RankPages, crew: Crew | None, page_bytes: Sequence[int]) -> None:
        """`crew`: the other ranks; None: there are none. `page_bytes`: of each rank's part."""
        self._ours, self._crew, self.page_bytes = ours, crew, tuple(page_bytes)

    def match(self, keys: Sequence[bytes]) -> Future:
        """How many pages can be loaded, up to the first that cannot."""
        return self._begin("match", min, 0, _array(keys))

    def load(self, keys: Sequence[bytes], slots: Sequence[int]) -> Future:
        """Fill slots that nothing is stored in from now on. Tells of each whether it was loaded."""
        nothing = [False] * len(keys)
        return self._begin("load", _in_all, nothing, _array(keys), list(slots))

    def save(self, keys: Sequence[bytes], pages: Sequence[int]) -> Future:
        """Keep pages as they are after all that was launched so far."""
        return self._begin("save", lambda _: None, None, _array(keys), list(pages))

    def _begin(
        self, name: str, merge: Callable[[list[Any]], Any], miss: Any, *values: Any
    ) -> Future:
        """Let all ranks do something. `miss`: what one that is gone comes back with."""
        theirs = [] if self._crew is None else self._crew.begin(f"{name}_pages", *values)
        ours = getattr(self._ours, name)(*values)
        return ours if not theirs else _merged([ours, *theirs], merge, miss)


def _array(keys: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)


def _in_all(loaded: list[list[bool]]) -> list[bool]:
    return [all(of_ranks) for of_ranks in zip(*loaded, strict=True)]


def _merged(futures: Sequence[Future], merge: Callable[[list[Any]], Any], miss: Any) -> Future:
    """What comes of all of them, when the last is done."""
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
