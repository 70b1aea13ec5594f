"""Peers: engines of this host whose pages a rank can read, found by their files in a folder."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from formats.errors import InputError
from qserve.kv_transfer.peer.layout import BufferFacts, Source, mismatch, sources
from qserve.kv_transfer.peer.memory import BYTES_SUFFIX, PeerMemory
from qserve.kv_transfer.peer.slot_index import SUFFIX, IndexFileError, SlotIndex

SCAN_SECONDS = 0.5

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """Another engine: the buffers of its ranks, which hold the same pages in the same slots."""

    indexes: list[SlotIndex]
    memories: list[PeerMemory]
    sources: list[list[Source]]  # of each own tensor
    numbers: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key -> page, batch
    num_read: int = 0  # pages whose entries were read

    @property
    def name(self) -> str:
        return self.indexes[0].facts.engine

    @property
    def num_slots(self) -> int:
        return self.indexes[0].facts.num_slots

    @property
    def is_alive(self) -> bool:
        return all(index.is_alive for index in self.indexes)

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Number and batch of a page that is announced and not overwritten."""
        found = self.numbers.get(key)
        return found if found is not None and self.is_valid(found[0]) else None

    def is_valid(self, number: int) -> bool:
        """True if the slot of a page was not given to another page."""
        return all(index.is_valid(number) for index in self.indexes)

    def num_layers(self, number: int, count: int, batch: int) -> int:
        """Layers of successive pages of a batch that all ranks have copied."""
        return min(index.num_layers(number, count, batch) for index in self.indexes)

    def refresh(self) -> None:
        """Read the entries that were written since the last time."""
        index = self.indexes[0]
        begun = index.begun
        self.num_read = max(self.num_read, begun - self.num_slots)
        while self.num_read < begun:
            found = index.entry(self.num_read)
            if found is None:
                if index.is_valid(self.num_read):
                    break  # it is being written
            else:
                self.numbers[found[0]] = self.num_read, found[1]
            self.num_read += 1
        if len(self.numbers) > 2 * self.num_slots:
            oldest = begun - self.num_slots
            self.numbers = {k: each for k, each in self.numbers.items() if each[0] >= oldest}

    def close(self) -> None:
        for each in (*self.memories, *self.indexes):
            each.close()


class Peers:
    """The usable engines of a folder. One thread at a time calls the methods."""

    def __init__(self, folder: Path, ours: BufferFacts, device: torch.device) -> None:
        self._folder, self._ours, self._device = folder, ours, device
        self._peers: dict[str, Peer] = {}
        self._refused: set[str] = set()  # engines, and files that are no index
        self._scanned = float("-inf")
        # waits for copies out of their memory, before that is unmapped
        self.finish_copies: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def refresh(self, *, now: bool = False) -> None:
        """Read what engines have announced; look for new and dead ones from time to time."""
        if now or time.monotonic() - self._scanned > SCAN_SECONDS:
            self._scanned = time.monotonic()
            self._scan()
        for peer in self._peers.values():
            peer.refresh()

    def drop(self, peer: Peer, reason: str) -> None:
        """Use an engine no more."""
        if self._peers.pop(peer.name, None) is not None:
            logger.warning("KV peer %s %s: its pages are computed here instead", peer.name, reason)
            self._refused.add(peer.name)
            self.finish_copies()
            peer.close()

    def close(self) -> None:
        self.finish_copies()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _scan(self) -> None:
        for peer in self:
            if not peer.is_alive:
                paths = [index.path for index in peer.indexes]
                self.drop(peer, "is gone")
                for path in paths:
                    _remove(path)
        found: dict[str, list[SlotIndex]] = {}
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            engine = path.name.partition(".")[0]
            if engine in self._peers or engine in self._refused or engine == self._ours.engine:
                continue
            try:
                index = SlotIndex.open(path)
            except (OSError, ValueError, IndexFileError) as error:
                if not isinstance(error, FileNotFoundError) and path.name not in self._refused:
                    self._refused.add(path.name)
                    logger.warning("KV peer: %s %s; it is not used", path, error)
                continue
            if index.is_alive:
                found.setdefault(engine, []).append(index)
                continue
            index.close()
            _remove(path)
        for engine, indexes in found.items():
            if len(indexes) < indexes[0].facts.num_ranks:
                for index in indexes:  # the others are still starting
                    index.close()
                continue
            self._add(engine, indexes)

    def _add(self, engine: str, indexes: list[SlotIndex]) -> None:
        indexes.sort(key=lambda index: index.facts.rank)
        facts = [index.facts for index in indexes]
        memories: list[PeerMemory] = []
        try:
            if reason := mismatch(self._ours, facts[0]):
                raise InputError(
                    f"KV peer {engine} ({facts[0].model})",
                    reason,
                    "start both engines with the same model, --block-size, --dtype and"
                    " --kv-cache-dtype",
                )
            taken = sources(self._ours.tensors, [each.tensors for each in facts])
            for index in indexes:
                memories.append(PeerMemory(index.path, index.facts, self._device))
        except (InputError, OSError, ValueError) as error:
            logger.error("%s. Its pages are computed here instead", error)
            self._refused.add(engine)
            for each in (*memories, *indexes):
                each.close()
            return
        self._peers[engine] = Peer(indexes=indexes, memories=memories, sources=taken)
        logger.info("KV peer %s: %d ranks, %d slots", engine, len(facts), facts[0].num_slots)


def remove_dead(folder: Path) -> None:
    """Remove the files of engines that were killed: on a CPU they hold memory."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, IndexFileError):
            index = SlotIndex.open(path)
            is_alive = index.is_alive
            index.close()
            if not is_alive:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove the files of an engine that was killed."""
    for each in (path, path.with_suffix(BYTES_SUFFIX)):
        each.unlink(missing_ok=True)
