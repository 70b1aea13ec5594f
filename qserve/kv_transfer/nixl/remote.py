"""RemoteTable and RemotePages: another rank's slot table and buffer, read through NIXL."""

from collections.abc import Iterator, Sequence

import torch

from formats.errors import InputError
from qserve.kv_transfer.nixl.agent import Agent, Buffer, Part
from qserve.kv_transfer.nixl.page_server import PageConnection
from qserve.kv_transfer.peer.layout import ALIGNMENT, BufferFacts
from qserve.kv_transfer.peer.memory import TransferError
from qserve.kv_transfer.peer.slot_table import (
    ENTRIES,
    ENTRY,
    SlotTable,
    progress_offset,
    table_bytes,
)

STAGING_BYTES = 32 * 2**20  # more if one tensor of a page is larger


class RemoteTable(SlotTable):
    """A local copy of another rank's slot table. `pull` updates it."""

    def __init__(self, agent: Agent, connection: PageConnection) -> None:
        """Raises InputError or TransferError."""
        self.connection, self._agent = connection, agent
        announced = connection.announcement
        self._region, facts = announced.table, announced.facts
        self._buffer = agent.allocate(table_bytes(facts.num_slots), torch.device("cpu"))
        self._buffer.bytes_X.zero_()
        try:
            self.agent_name = agent.add(announced.metadata)
        except BaseException:
            agent.release(self._buffer)
            raise
        super().__init__(facts, memoryview(self._buffer.bytes_X.numpy()))

    @property
    def is_alive(self) -> bool:
        return self.connection.is_alive

    def pull(self, first_page: int | None = None) -> None:
        """Update `begun` and the progress; then the entries from `first_page` on, unless None.

        Raises TransferError.
        """
        count = self.facts.num_slots
        self._copy((0, 8), (progress_offset(count), 8 * count))
        if first_page is None:
            return
        begun = self.begun
        first = max(first_page, begun - count)
        if first >= begun:
            return
        start, end = first % count, first % count + begun - first
        spans = [(start, min(end, count)), (0, end - count)]
        size = ENTRY.itemsize
        self._copy(*((ENTRIES + a * size, (b - a) * size) for a, b in spans if b > a))

    def close(self) -> None:
        super().close()
        self._agent.remove(self.agent_name)
        self._agent.release(self._buffer)

    def _copy(self, *spans: tuple[int, int]) -> None:
        """Copy ranges (start, size) of the remote table to the same offsets here."""
        parts = [Part(target=start, source=start, size=size) for start, size in spans]
        self._agent.read(self.agent_name, self._region, self._buffer, parts)


class Staging:
    """Registered memory that receives page data before it is written to KV pages."""

    def __init__(self, agent: Agent, facts: BufferFacts, device: torch.device) -> None:
        """Raises InputError."""
        self._agent, self._device = agent, device
        largest = max(tensor.num_bytes for tensor in facts.tensors)
        self.num_bytes = max(STAGING_BYTES, largest)
        self._buffer = agent.allocate(self.num_bytes, device)

    @property
    def buffer(self) -> Buffer:
        """Memory that no timed-out read may still write to. Raises TransferError."""
        if self._buffer.is_lost:
            try:
                fresh = self._agent.allocate(self.num_bytes, self._device)
            except InputError as error:
                raise TransferError(str(error)) from error
            self._agent.release(self._buffer)
            self._buffer = fresh
        if self._device.type == "cuda":
            # wait for copies that read from it
            torch.cuda.current_stream(self._device).synchronize()
        return self._buffer

    def close(self) -> None:
        self._agent.release(self._buffer)


class RemotePages:
    """Another rank's buffer."""

    def __init__(self, agent: Agent, table: RemoteTable, staging: Staging) -> None:
        self._agent, self._table, self._staging = agent, table, staging
        self._facts, self._offsets = table.facts, table.facts.offsets
        self._region = table.connection.announcement.pages

    def read(
        self, numbers: Sequence[int], slot: int, count: int
    ) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Read tensors of `count` slots from `slot` on, as SlotMemory.read describes.

        One transfer reads as much as fits into the staging memory. Raises RuntimeError.
        """
        waiting: list[tuple[int, slice, Part]] = []
        used = 0
        for number in numbers:
            size = self._facts.tensors[number].num_bytes
            start = self._offsets[number] + slot * size
            first = 0
            while first < count:
                rows = min(count - first, max(0, self._staging.num_bytes - used) // size)
                if not rows:
                    yield from self._transfer(waiting)
                    waiting, used = [], 0
                    continue
                part = Part(target=used, source=start + first * size, size=rows * size)
                waiting.append((number, slice(first, first + rows), part))
                first += rows
                used = -(-(used + rows * size) // ALIGNMENT) * ALIGNMENT
        yield from self._transfer(waiting)

    def close(self) -> None:
        """Do nothing: all engines share the staging memory."""

    def _transfer(
        self, waiting: Sequence[tuple[int, slice, Part]]
    ) -> Iterator[tuple[int, slice, torch.Tensor]]:
        if not waiting:
            return
        buffer = self._staging.buffer
        parts = [part for _, _, part in waiting]
        self._agent.read(self._table.agent_name, self._region, buffer, parts)
        for number, rows, part in waiting:
            found = buffer.bytes_X[part.target : part.target + part.size]
            yield number, rows, self._facts.tensors[number].view(found)
