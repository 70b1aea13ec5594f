"""RankAdapters: one rank's parts of adapters on the host, by number. Knows no other rank.

The leader gives each adapter a number; slots are filled and parts are forgotten by it.
"""

import torch

from formats.lora import read_adapter
from qserve.lora.layout import PackedAdapter, adapter_digest
from qserve.lora.slot_memory import SlotMemory


class RankAdapters:
    """What a worker has of adapters, and the slots that they go into."""

    def __init__(self, memory: SlotMemory, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of activations."""
        self.memory = memory
        self._dtype, self._is_pinned = dtype, device.type == "cuda"
        self._packed: dict[int, PackedAdapter] = {}

    def read(self, number: int, path: str) -> str:
        """Keep our part of a folder. Returns a digest of all of it; any thread may.

        Raises InputError.
        """
        layout = self.memory.layout
        found = read_adapter(path, layout.shapes, max_rank=self.memory.max_rank)
        self._packed[number] = layout.pack(found, self._dtype, pinned=self._is_pinned)
        return adapter_digest(found)

    def place(self, slot: int, number: int) -> None:
        """Fill a slot, after the steps that were launched before. Does not wait for it."""
        self.memory.place(slot, self._packed[number])

    def forget(self, number: int) -> None:
        """Drop our part, if we have it. Any thread may."""
        self._packed.pop(number, None)
