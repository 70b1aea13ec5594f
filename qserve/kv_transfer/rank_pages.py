"""RankPages: transfer of one rank's KV pages to and from its connector.

Every rank keeps its own shard of a page under its own key, so all ranks may use one folder. Threads
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

LOADERS, WRITERS = 4, 2  # threads

logger = logging.getLogger(__name__)


class HostCopy(Protocol):
    """Copy from the device to the host that is under way."""

    def wait(self) -> torch.Tensor:
        """Return the copy, complete."""


class PageMemory(Protocol):
    """A rank's pages on the device and its slots on the host (engine: PageCopies)."""

    @property
    def page_bytes(self) -> int: ...

    def slot(self, number: int) -> memoryview:
        """Bytes of a slot, valid after `idle`'s result was called."""

    def idle(self) -> Callable[[], None]:
        """Return a function that waits for the copies under way now."""

    def read(self, pages: Sequence[int]) -> HostCopy | None:
        """Begin to copy pages [N, bytes] to the host; None: memory ran out."""


class RankPages:
    """Connector of one rank with the slots and pages of this rank.

    Keys are uint8 [N, 32], those of the leader. `kind`: states, whose snapshots have the keys of
    the pages at whose ends they were made.
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
        """Number of pages that can be loaded, up to the first that cannot."""
        return self._loaders.submit(_match, self._connector, self._own(keys_NB))

    def deepest(self, keys_NB: np.ndarray) -> Future:
        """Number of keys up to the last that can be loaded, whether or not those before it can."""
        return self._loaders.submit(_deepest, self._connector, self._own(keys_NB))

    def load(self, keys_NB: np.ndarray, slots: Sequence[int]) -> Future:
        """Fill reserved slots. The future returns for each slot if it was loaded."""
        pages = [self._copies.slot(slot) for slot in slots]
        idle = self._copies.idle()
        return self._loaders.submit(_load, self._connector, self._own(keys_NB), pages, idle)

    def save(self, keys_NB: np.ndarray, pages: Sequence[int]) -> Future:
        """Save pages as they are after all launched work, if there is memory for the copy."""
        copy = self._copies.read(pages)
        if copy is None:
            logger.warning("%d KV pages are not saved: memory ran out", len(pages))
            done: Future = Future()
            done.set_result(None)
            return done
        return self._writers.submit(_save, self._connector, self._own(keys_NB), copy)

    def _own(self, keys_NB: np.ndarray) -> list[bytes]:
        """Keys of this rank's shards."""
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
    """Load pages up to the first that fails. Returns for each page if it was loaded."""
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
