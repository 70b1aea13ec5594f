"""PageLink: lets engines find and read each other's buffers. MappedLink: a link on one host."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from qserve.kv_transfer.peer.finder import Finder, FolderFinder, remove_dead
from qserve.kv_transfer.peer.layout import BufferFacts
from qserve.kv_transfer.peer.memory import BufferMemory, allocate, bytes_path
from qserve.kv_transfer.peer.settings import PeerSettings
from qserve.kv_transfer.peer.slot_index import STATES_SUFFIX, SUFFIX, SlotIndex
from qserve.kv_transfer.peer.slot_table import SlotTable

# (device, handle, address) of memory -> description of a buffer in this memory
Describe = Callable[[str, str, int], BufferFacts]


class PageLink(Protocol):
    """One rank's link to other engines."""

    settings: PeerSettings

    def publish(self, ours: BufferFacts, describe: Describe) -> tuple[SlotTable, BufferMemory]:
        """Create this rank's buffer and announce it. Raises InputError.

        `ours`: description of the buffer without its memory. `describe`: completes it.
        """

    def finder(self, ours: BufferFacts) -> Finder:
        """Start searching for the buffers of other engines."""

    def close(self) -> None:
        """Close the link. Everything that uses it must be closed before."""


class MappedLink:
    """Link of engines of one host, which find and map each other's buffers through a folder."""

    def __init__(
        self, extra: Mapping[str, Any], device: torch.device, *, of_states: bool = False
    ) -> None:
        """`extra`: kv_connector_extra_config. `of_states`: buffers have states, not KV pages.

        Raises InputError.
        """
        self.settings, self._device = PeerSettings.parse(extra), device
        self._suffix = STATES_SUFFIX if of_states else SUFFIX
        self.settings.make_folder()
        remove_dead(self.settings.path, self._suffix)

    def publish(self, ours: BufferFacts, describe: Describe) -> tuple[SlotTable, BufferMemory]:
        path = self.settings.path / f"{ours.engine}.{ours.rank}{self._suffix}"
        memory = allocate(bytes_path(path), ours.offsets[-1], self._device)
        try:
            facts = describe(memory.device, memory.handle, memory.address)
            return SlotIndex.create(path, facts), memory
        except BaseException:
            memory.close()
            raise

    def finder(self, ours: BufferFacts) -> FolderFinder:
        return FolderFinder(self.settings.path, self._suffix, self._device)

    def close(self) -> None:
        """Do nothing: readers and the writer close what they have opened."""
