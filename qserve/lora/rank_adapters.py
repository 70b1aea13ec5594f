"""RankAdapters: one rank's parts of adapters on the host.

The leader gives each adapter a number, by which slots are filled and parts are dropped.
"""

from collections.abc import Callable

import torch

from formats.peft.lora import read_adapter
from qserve.lora.layout import PackedAdapter, adapter_digest
from qserve.lora.slot_memory import SlotMemory


class RankAdapters:
    """The adapters of one worker, and their slots."""

    def __init__(self, memory: SlotMemory, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of activations."""
        self.memory = memory
        self._dtype, self._is_pinned = dtype, device.type == "cuda"
        self._packed: dict[int, PackedAdapter] = {}

    def read(self, number: int, path: str, is_wanted: Callable[[], bool] = lambda: True) -> str:
        """Read this rank's part of a folder. Returns a digest of the whole adapter. Thread-safe.

        Raises InputError, also if `is_wanted` returns False before the end.
        """
        layout, max_rank = self.memory.layout, self.memory.max_rank
        found = read_adapter(path, layout.shapes, max_rank=max_rank, is_wanted=is_wanted)
        self._packed[number] = layout.pack(found, self._dtype, pinned=self._is_pinned)
        return adapter_digest(found)

    def place(self, slot: int, number: int) -> None:
        """Fill a slot after the steps that were launched before. Does not wait for the copy."""
        self.memory.place(slot, self._packed[number])

    def forget(self, number: int) -> None:
        """Drop this rank's part, if present. Thread-safe."""
        self._packed.pop(number, None)
