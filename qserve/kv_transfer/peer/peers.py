"""Peers: the engines whose pages a rank can read."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from formats.errors import InputError
from qserve.kv_transfer.peer.finder import Finder
from qserve.kv_transfer.peer.layout import BufferFacts, Source, mismatch, sources
from qserve.kv_transfer.peer.memory import SlotMemory, TransferError
from qserve.kv_transfer.peer.slot_table import SlotTable

RETRY_SECONDS = 30.0  # time before an engine is used again after a failed read
SCAN_SECONDS = 0.5  # interval of searches for new and dead engines

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """Another engine and the buffers of its ranks, which hold the same pages in the same slots."""

    indexes: list[SlotTable]
    memories: list[SlotMemory]
    sources: list[list[Source]]  # for each tensor of this rank
    numbers: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key -> (page, batch)
    num_read: int = 0  # number of pages whose table entries were read

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
        """Return (number, batch) of a page that is announced and not overwritten, or None."""
        found = self.numbers.get(key)
        return found if found is not None and self.is_valid(found[0]) else None

    def is_valid(self, number: int) -> bool:
        """Return True if the slot of a page was not reused for another page."""
        return all(index.is_valid(number) for index in self.indexes)

    def num_layers(self, number: int, count: int, batch: int) -> int:
        """Return how many layers of consecutive pages of a batch all ranks have copied."""
        return min(index.num_layers(number, count, batch) for index in self.indexes)

    def refresh(self) -> None:
        """Read the entries that were written since the last call. Raises TransferError."""
        for index in self.indexes[1:]:
            index.pull()
        index = self.indexes[0]
        index.pull(self.num_read)
        begun = index.begun
        self.num_read = max(self.num_read, begun - self.num_slots)
        while self.num_read < begun:
            found = index.entry(self.num_read)
            if found is None:
                if index.is_valid(self.num_read):
                    break  # the entry is being written
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
    """The usable engines that a finder finds. Only one thread at a time may call a method."""

    def __init__(self, finder: Finder, ours: BufferFacts) -> None:
        self._finder, self._ours = finder, ours
        self._peers: dict[str, Peer] = {}
        self._refused: dict[str, float] = {}  # engine -> when it may be used again
        self._scanned = float("-inf")
        # waits for copies from a peer's memory before the memory is unmapped
        self.finish_copies: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def refresh(self, *, now: bool = False) -> None:
        """Read new announcements of engines. Every SCAN_SECONDS, or `now`, search for engines."""
        if now or time.monotonic() - self._scanned > SCAN_SECONDS:
            self._scanned = time.monotonic()
            self._scan(now)
        for peer in self:
            try:
                peer.refresh()
            except TransferError as error:
                self.drop(peer, f"cannot be read ({error})")

    def renew(self, peer: Peer) -> bool:
        """Update which slots of a peer were reused. Returns False if that fails."""
        try:
            for index in peer.indexes:
                index.pull()
        except TransferError as error:
            self.drop(peer, f"cannot be read ({error})")
            return False
        return True

    def drop(self, peer: Peer, reason: str) -> None:
        """Stop using an engine for RETRY_SECONDS."""
        if self._peers.pop(peer.name, None) is not None:
            logger.warning("KV peer %s %s: its pages are computed here instead", peer.name, reason)
            self._refused[peer.name] = time.monotonic() + RETRY_SECONDS
            self.finish_copies()
            peer.close()

    def close(self) -> None:
        self.finish_copies()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._finder.close()

    def _scan(self, now: bool) -> None:
        for peer in self:
            if not peer.is_alive:
                indexes = peer.indexes
                self.drop(peer, "is gone")
                for index in indexes:
                    self._finder.forget_dead(index)
        self._refused = {n: until for n, until in self._refused.items() if until > time.monotonic()}
        known = {self._ours.engine, *self._peers, *self._refused}
        for engine, indexes in self._finder.find(known, now=now).items():
            if len(indexes) < indexes[0].facts.num_ranks:
                for index in indexes:  # the engine's other ranks are still starting
                    index.close()
                continue
            self._add(engine, indexes)

    def _add(self, engine: str, indexes: list[SlotTable]) -> None:
        indexes.sort(key=lambda index: index.facts.rank)
        facts = [index.facts for index in indexes]
        memories: list[SlotMemory] = []
        try:
            if reason := mismatch(self._ours, facts[0]):
                raise InputError(
                    f"KV peer {engine} ({facts[0].model})",
                    reason,
                    "start both engines with the same model, --block-size, --dtype,"
                    " --kv-cache-dtype and, if the model has states, --speculative-config",
                )
            taken = sources(self._ours.tensors, [each.tensors for each in facts])
            for index in indexes:
                memories.append(self._finder.memory(index))
        except (InputError, OSError, RuntimeError, ValueError) as error:
            logger.error("%s. Its pages are computed here instead", error)
            self._refused[engine] = math.inf
            for each in (*memories, *indexes):
                each.close()
            return
        self._peers[engine] = Peer(indexes=indexes, memories=memories, sources=taken)
        logger.info("KV peer %s: %d ranks, %d slots", engine, len(facts), facts[0].num_slots)
