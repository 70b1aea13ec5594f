"""State of one rank for exchanges inside kernels: regions of peer memory, and counters.

Legend: n ranks.
"""

from dataclasses import dataclass

import torch

from qkernels.collective.config import (
    BLOCKS,
    MAX_RANKS,
    TILE_BYTES,
    Limits,
    RowsLayout,
    limits,
    rows_layouts,
    shard_elements,
)
from qkernels.collective.peer_memory import PeerMemory
from qkernels.errors import KernelError
from qkernels.gpu.config import ceil_div
from qkernels.operands.split_k import LinearOutput, SplitKPartials

# Polls of a waiting block before it gives up. A poll takes 0.5 us or more, so a block waits at
# least a minute: a rank may compile a kernel while the others wait for it.
SPIN_LIMIT = 2**27
ABORTED = -1
ALIGNMENT = 256
FLAT_PHASES, ROWS_PHASES, PAIR_PHASES = 2, 3, 2
PAIR_MAX_BYTES = 2**28  # of a phase: a limit on memory; longer steps sum as before


class PeerLostError(KernelError):
    """A rank did not send its data for a sum. From then on the ranks are out of step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """Region of every rank's buffer for one kind of kernel, and this rank's counters."""

    words: torch.Tensor  # int32 words of this rank's region
    slot_bytes: int  # bytes that one sender writes in one phase
    bases: torch.Tensor  # int64 [n]: address of the region on every rank
    phases: torch.Tensor  # int32 [blocks]: the phase of the next call
    broken: torch.Tensor  # int32 []: rank whose data did not arrive, + 1
    report: torch.Tensor  # copy of `broken` in host memory; a negative number stops the wait

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Return the kernel arguments after the buffer."""
        return self.bases, self.phases, self.broken, self.report

    @property
    def slot_words(self) -> int:
        return self.slot_bytes // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLayout:
    """Layout of peer memory.

    With unequal shards of a linear's inputs, one rank's product may return split-K partial sums and
    another's a tensor. Ranks that send different forms would wait for each other forever, so there
    is then one form for both.
    """

    ranks: int
    limits: Limits
    rows: tuple[RowsLayout, ...]
    equal_shards: bool = True  # all ranks' shards of a linear have the same shape
    pair_bytes: int = 0  # largest message that two ranks exchange by copies (pair_sum.py)

    @classmethod
    def of_model(
        cls,
        ranks: int,
        channels: int,
        within: Limits | None = None,
        pair_rows: int = 0,
        equal_shards: bool = True,
    ) -> "PeerLayout":
        """Return the layout for `ranks` ranks and norms of `channels` channels.

        `within` overrides the limits. `pair_rows`: most rows of a sum that two ranks exchange by
        copies; more ranks have no such sums.
        """
        if not 2 <= ranks <= MAX_RANKS:
            raise KernelError("ranks", f"expected 2 to {MAX_RANKS}, found {ranks}", "use NCCL")
        found = within or limits(ranks)
        row_bytes = channels * torch.bfloat16.itemsize
        pair_bytes = min(pair_rows, PAIR_MAX_BYTES // row_bytes) * row_bytes if ranks == 2 else 0
        return cls(
            ranks=ranks,
            limits=found,
            rows=rows_layouts(ranks, channels, found.rows, equal_shards),
            equal_shards=equal_shards,
            pair_bytes=ceil_div(pair_bytes, ALIGNMENT) * ALIGNMENT,
        )

    @property
    def flat_bytes(self) -> int:
        return ceil_div(self.limits.one_shot, TILE_BYTES) * TILE_BYTES

    @property
    def shard_bytes(self) -> int:
        """Return the bytes of a shard in two_shot.py."""
        shard = shard_elements(self.limits.two_shot // 2, self.ranks, 2) * 2
        return ceil_div(shard, ALIGNMENT) * ALIGNMENT

    def sizes(self) -> list[int]:
        """Return the bytes of each channel: flat, scatter, gather, then the row channels."""
        flat = FLAT_PHASES * (self.ranks - 1)
        of_rows = [ROWS_PHASES * (self.ranks - 1) * each.slot_bytes() for each in self.rows]
        sizes = [flat * self.flat_bytes, flat * self.shard_bytes, flat * self.shard_bytes, *of_rows]
        return [ceil_div(size, ALIGNMENT) * ALIGNMENT for size in sizes]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes()) + PAIR_PHASES * self.pair_bytes


class PairChannel:
    """Region in which a rank receives the rows of its only peer, and the stream of its copies."""

    def __init__(self, memory: PeerMemory, offset: int, message_bytes: int) -> None:
        device = memory.own.device
        self.message_bytes = message_bytes
        region = memory.own[offset : offset + PAIR_PHASES * message_bytes]
        self.received = region.view(PAIR_PHASES, message_bytes)
        self.peer_address = memory.addresses[1 - memory.rank] + offset
        self.num_begun = 0  # sums begun; only the last one may be read
        self.phase = 0  # of the next sum; it changes when a sum is read
        self.token = torch.zeros(1, dtype=torch.float32, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None


class Peers:
    """One rank's view of all ranks.

    Kernels that use it must run on one stream, in the same order on all ranks.
    """

    def __init__(
        self, memory: PeerMemory, layout: PeerLayout, spin_limit: int = SPIN_LIMIT
    ) -> None:
        if memory.ranks != layout.ranks or memory.own.numel() < layout.num_bytes:
            raise KernelError(
                "peer memory",
                f"expected {layout.num_bytes} bytes on {layout.ranks} ranks, "
                f"found {memory.own.numel()} on {memory.ranks}",
                "make the memory with this layout",
            )
        self.memory, self.layout, self.spin_limit = memory, layout, spin_limit
        self.rank, self.ranks = memory.rank, memory.ranks
        device = memory.own.device
        on_gpu = device.type == "cuda"
        self._broken = torch.zeros((), dtype=torch.int32, device=device)
        # kernels and the host read and write it without synchronization
        self._report = torch.zeros((), dtype=torch.int32, pin_memory=on_gpu)
        offset = 0
        blocks = [BLOCKS, BLOCKS, BLOCKS, *(each.rows * each.parts for each in layout.rows)]
        slots = [
            *(layout.flat_bytes, layout.shard_bytes, layout.shard_bytes),
            *(each.slot_bytes() for each in layout.rows),
        ]
        channels = []
        for size, slot_bytes, count in zip(layout.sizes(), slots, blocks, strict=True):
            bases = [address + offset for address in memory.addresses]
            channels.append(
                Channel(
                    words=memory.own[offset : offset + size].view(torch.int32),
                    slot_bytes=slot_bytes,
                    bases=torch.tensor(bases, dtype=torch.int64, device=device),
                    phases=torch.zeros(count, dtype=torch.int32, device=device),
                    broken=self._broken,
                    report=self._report,
                )
            )
            offset += size
        size = layout.pair_bytes
        self.pair = PairChannel(memory, offset, size) if size else None
        self.flat, self.scatter, self.gather, *of_rows = channels
        self._rows = list(zip(layout.rows, of_rows, strict=True))

    def rows(self, x_MC: LinearOutput) -> tuple[RowsLayout, Channel] | None:
        """Return the channel for x's rows; None: there is none.

        Partial sums use the float32 channel if there is one; otherwise they are rounded. With
        unequal shards a tensor also uses it.
        """
        rows, channels = x_MC.shape
        rounded = x_MC.dtype.itemsize
        for item_bytes in (4, rounded) if isinstance(x_MC, SplitKPartials) else (rounded, 4):
            for layout, channel in self._rows:
                if (layout.channels, layout.item_bytes) == (channels, item_bytes) and (
                    0 < rows <= layout.rows
                ):
                    return layout, channel
        return None

    def check(self) -> None:
        """Raise PeerLostError if a kernel timed out. Does not wait for running kernels."""
        lost = int(self._report) - 1
        if lost >= 0:
            raise PeerLostError(
                f"all-reduce on rank {self.rank}",
                f"rank {lost} did not send its data within {self.spin_limit} polls",
                "see that rank's log (it exited, hangs, or runs other steps), then restart",
            )

    def abort(self) -> None:
        """Stop kernels from waiting for a lost rank. Can be called from any thread.

        It writes to host memory, because a copy to the device could be queued after the waiting
        kernel.
        """
        self._report.fill_(ABORTED)

    def close(self) -> None:
        """Free the memory. No kernel may use it any more."""
        self.memory.close()
