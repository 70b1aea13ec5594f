"""RankPages: loads and saves one rank's KV pages through its connector.

Every rank stores its shard of a page under a separate key, so all ranks may use one folder. Threads
do the transfers. A failure of the connector counts as a miss.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Protocol

import numpy as np
import torch

from qserve.kv_transfer.connector import KvConnector

LOADERS, WRITERS = 4, 2  # numbers of threads

logger = logging.getLogger(__name__)


class HostCopy(Protocol):
    """A copy from the device to the host, in progress."""

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return it."""


class PageMemory(Protocol):
    """A rank's pages on the device and slots on the host, as the engine's PageCopies has them."""

    @property
    def page_bytes(self) -> int: ...

    def slot(self, number: int) -> memoryview:
        """Return the bytes of a slot. Call the function from `idle` before using them."""

    def idle(self) -> Callable[[], None]:
        """Return a function that waits for the copies started so far."""

    def read(self, pages: Sequence[int]) -> HostCopy | None:
        """Start copying pages [N, bytes] to the host. Returns None if memory runs out."""


class RankPages:
    """The connector of one rank, with the rank's slots and pages.

    Keys are uint8 [N, 32], as the leader has them. `kind`: "" for pages, "states" for snapshots; a
    snapshot has the key of the page at whose end it was made.
    """

    def __init__(
        self,
        connector: KvConnector,
        copies: PageMemory,
        *,
        rank: int = 0,
        size: int = 1,
        kind: str = "",
    ) -> None:
        self._connector, self._copies = connector, copies
        name = f"rank {rank} of {size}" if size > 1 else ""
        self._name = f"{name}{kind}".encode()
        self._loaders = ThreadPoolExecutor(LOADERS, "kv-load")
        self._writers = ThreadPoolExecutor(WRITERS, "kv-save")

    @property
    def page_bytes(self) -> int:
        return self._copies.page_bytes

    def match(self, keys_NB: np.ndarray) -> Future:
        """Count the leading pages that can be loaded."""
        return self._loaders.submit(_match, self._connector, self._own(keys_NB))

    def deepest(self, keys_NB: np.ndarray) -> Future:
        """Count the keys up to the last one that can be loaded; earlier ones may be missing."""
        return self._loaders.submit(_deepest, self._connector, self._own(keys_NB))

    def load(self, keys_NB: np.ndarray, slots: Sequence[int]) -> Future:
        """Fill reserved slots. The future's result says for each slot if it was loaded."""
        pages = [self._copies.slot(slot) for slot in slots]
        idle = self._copies.idle()
        return self._loaders.submit(_load, self._connector, self._own(keys_NB), pages, idle)

    def save(self, keys_NB: np.ndarray, pages: Sequence[int]) -> Future:
        """Save pages as they are after all launched work. Does nothing if memory runs out."""
        copy = self._copies.read(pages)
        if copy is None:
            logger.warning("%d KV pages are not saved: memory ran out", len(pages))
            done: Future = Future()
            done.set_result(None)
            return done
        return self._writers.submit(_save, self._connector, self._own(keys_NB), copy)

    def _own(self, keys_NB: np.ndarray) -> list[bytes]:
        """Return the keys of this rank's shards."""
        keys = [key_B.tobytes() for key_B in keys_NB]
        return [sha256(key + self._name).digest() for key in keys] if self._name else keys


def _match(connector: KvConnector, keys: Sequence[bytes]) -> int:
    try:
        return connector.match(keys)
    except Exception as error:  # connectors may be third-party code
        logger.warning("KV pages cannot be looked up: %s", error)
        return 0


def _deepest(connector: KvConnector, keys: Sequence[bytes]) -> int:
    return next((n for n in range(len(keys), 0, -1) if _match(connector, keys[n - 1 : n])), 0)


def _load(
    connector: KvConnector,
    keys: Sequence[bytes],
    pages: Sequence[memoryview],
    idle: Callable[[], None],
) -> list[bool]:
    """Load pages until one fails. Returns for each page if it was loaded."""
    idle()
    loaded = [False] * len(keys)
    for index, (key, page) in enumerate(zip(keys, pages, strict=True)):
        try:
            loaded[index] = bool(connector.load(key, page))
        except Exception as error:  # connectors may be third-party code
            logger.warning("A KV page cannot be loaded: %s", error)
        if not loaded[index]:
            break
    return loaded


def _save(connector: KvConnector, keys: Sequence[bytes], copy: HostCopy) -> None:
    for key, page in zip(keys, copy.wait().numpy(), strict=True):
        try:
            connector.save(key, memoryview(page))
        except Exception as error:  # connectors may be third-party code
            logger.warning("A KV page cannot be saved: %s", error)
