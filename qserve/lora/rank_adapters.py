"""RankAdapters: one rank's shards of adapters, in host memory.

The leader numbers the adapters. The number selects the adapter to copy to a slot or to drop.
"""

from collections.abc import Callable

import torch

from formats.files.channel_factors import ChannelFactors
from formats.peft.lora import read_adapter
from qserve.lora.layout import PackedAdapter, adapter_digest
from qserve.lora.slot_memory import SlotMemory


class RankAdapters:
    """The adapters of one worker, on the host and in device slots."""

    def __init__(
        self,
        memory: SlotMemory,
        dtype: torch.dtype,
        device: torch.device,
        factors: ChannelFactors | None = None,
    ) -> None:
        """`dtype`: dtype of activations. `factors`: of the checkpoint, which adapters must fit."""
        self.memory, self._factors = memory, factors
        self._dtype, self._is_pinned = dtype, device.type == "cuda"
        self._packed: dict[int, PackedAdapter] = {}

    def read(self, number: int, path: str, is_wanted: Callable[[], bool] = lambda: True) -> str:
        """Read this rank's shard of an adapter. Returns a digest of the whole adapter. Thread-safe.

        Raises InputError, also if `is_wanted` returns False before the end.
        """
        layout, max_rank = self.memory.layout, self.memory.max_rank
        found = read_adapter(
            path,
            layout.shapes,
            family=layout.family,
            stacked=layout.stacked,
            max_rank=max_rank,
            is_wanted=is_wanted,
        )
        digest = adapter_digest(found)
        if self._factors is not None:
            found = found.fitted(self._factors)
        self._packed[number] = layout.pack(found, self._dtype, pinned=self._is_pinned)
        return digest

    def place(self, slot: int, number: int) -> None:
        """Copy an adapter to a slot, after all launched steps. Does not wait for the copy."""
        self.memory.place(slot, self._packed[number])

    def forget(self, number: int) -> None:
        """Drop this rank's shard of an adapter, if present. Thread-safe."""
        self._packed.pop(number, None)
