"""RankPages: one rank's KV pages on their way to and from its connector. Knows no requests.

Every rank keeps its own part of a page, under a key of its own, so all of them may use one folder.
What is begun here is done by threads; what a connector fails at counts as a miss.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256

import numpy as np

from qserve.engine.out_of_memory import ran_out
from qserve.engine.page_copies import PageCopies
from qserve.engine.transfer import HostCopy
from qserve.kv_transfer.connector import KvConnector

LOADERS, WRITERS = 4, 2  # threads

logger = logging.getLogger(__name__)


class RankPages:
    """The connector of one rank, and the slots and pages that are its own.

    Keys are uint8 [N, 32], those of the leader.
    """

    def __init__(
        self, connector: KvConnector, copies: PageCopies, *, rank: int = 0, size: int = 1
    ) -> None:
        self._connector, self._copies = connector, copies
        self._name = f"rank {rank} of {size}".encode() if size > 1 else b""
        self._loaders = ThreadPoolExecutor(LOADERS, "kv-load")
        self._writers = ThreadPoolExecutor(WRITERS, "kv-save")

    @property
    def page_bytes(self) -> int:
        return self._copies.page_bytes

    def match(self, keys_NB: np.ndarray) -> Future:
        """How many pages can be loaded, up to the first that cannot."""
        return self._loaders.submit(_match, self._connector, self._own(keys_NB))

    def load(self, keys_NB: np.ndarray, slots: Sequence[int]) -> Future:
        """Fill slots that nothing is stored in from now on. Tells of each whether it was loaded."""
        pages = [self._copies.slot(slot) for slot in slots]
        idle = self._copies.idle()
        return self._loaders.submit(_load, self._connector, self._own(keys_NB), pages, idle)

    def save(self, keys_NB: np.ndarray, pages: Sequence[int]) -> Future:
        """Keep pages as they are after all that was launched so far, where there is memory."""
        try:
            copy = self._copies.read(pages)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            logger.warning("%d KV pages are not saved: memory ran out", len(pages))
            done: Future = Future()
            done.set_result(None)
            return done
        return self._writers.submit(_save, self._connector, self._own(keys_NB), copy)

    def _own(self, keys_NB: np.ndarray) -> list[bytes]:
        """Under which keys our parts are kept."""
        keys = [key_B.tobytes() for key_B in keys_NB]
        return [sha256(key + self._name).digest() for key in keys] if self._name else keys


def _match(connector: KvConnector, keys: Sequence[bytes]) -> int:
    try:
        return connector.match(keys)
    except Exception as error:  # of a connector, which may be anybody's
        logger.warning("KV pages cannot be looked up: %s", error)
        return 0


def _load(
    connector: KvConnector,
    keys: Sequence[bytes],
    pages: Sequence[memoryview],
    idle: Callable[[], None],
) -> list[bool]:
    """Whether each page was loaded; nothing follows one that was not."""
    idle()
    loaded = [False] * len(keys)
    for index, (key, page) in enumerate(zip(keys, pages, strict=True)):
        try:
            loaded[index] = bool(connector.load(key, page))
        except Exception as error:  # of a connector, which may be anybody's
            logger.warning("a KV page cannot be loaded: %s", error)
        if not loaded[index]:
            break
    return loaded


def _save(connector: KvConnector, keys: Sequence[bytes], copy: HostCopy) -> None:
    for key, page in zip(keys, copy.wait().numpy(), strict=True):
        try:
            connector.save(key, memoryview(page))
        except Exception as error:  # of a connector, which may be anybody's
            logger.warning("a KV page cannot be saved: %s", error)
