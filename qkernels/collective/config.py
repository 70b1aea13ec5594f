"""Choice of the all-reduce algorithm by message size, and the layout of buffers.

Legend: n ranks, M rows, C channels.
"""

from dataclasses import dataclass
from typing import Literal

from qkernels.gpu.config import ceil_div, power_of_two

Algorithm = Literal["one_shot", "two_shot"]

MAX_RANKS = 8
# Bytes of a tile of a flat message: 16 for each of 512 threads. One block processes a tile, and
# BLOCKS blocks are resident together on every GPU with at least 108 SMs.
TILE_BYTES = 8192
TILE_WARPS = 16
BLOCKS = 128

# With few rows, each row of a norm is divided into blocks of this many channels: 8 steps of 128, as
# in rowwise/norm.py.
PART_CHANNELS = 1024
FEW_ROWS = 4
MAX_CHANNELS = 2**14  # channels of a row that a block's registers hold
# More ranks or channels take more registers. Beyond one of these limits partial sums are rounded
# before they are sent. Beyond both, the norm is a separate kernel.
FEW_RANKS = 4
FEWER_CHANNELS = 2**13
VECTOR = 8  # channels in 16 bytes, the alignment of rows for vector copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest message in bytes for each algorithm. Beyond the last one NCCL is faster."""

    one_shot: int
    two_shot: int
    rows: int  # for a sum that is fused with a norm


KIB, MIB = 2**10, 2**20
# Largest number of ranks -> limits. One shot sends n - 1 times the message, two shots 2 (n - 1) / n
# times; these are equal for two ranks. Limits for 2 and 4 are measured on H200s
# (notes/collective.md), those for 8 are published crossover points on H100s and H200s.
LIMITS = {
    2: Limits(one_shot=1 * MIB, two_shot=32 * MIB, rows=128),
    4: Limits(one_shot=384 * KIB, two_shot=16 * MIB, rows=32),
    8: Limits(one_shot=128 * KIB, two_shot=8 * MIB, rows=16),
}


def limits(ranks: int) -> Limits:
    """Return the limits for a number of ranks, at most MAX_RANKS."""
    return next(found for most, found in LIMITS.items() if ranks <= most)


def algorithm_for(message_bytes: int, of: Limits) -> Algorithm | None:
    """Return the algorithm for a message of so many bytes; None: not by this package."""
    if message_bytes <= of.one_shot:
        return "one_shot"
    return "two_shot" if message_bytes <= of.two_shot else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLayout:
    """Layout of a row channel: [3 phases, n - 1 senders, rows, channels] of one element size."""

    rows: int
    channels: int
    item_bytes: int
    parts: int  # blocks per row

    @property
    def part(self) -> int:
        """Return the channels of a block."""
        return PART_CHANNELS if self.parts > 1 else self.channels

    def slot_bytes(self) -> int:
        return self.rows * self.channels * self.item_bytes


def rows_layouts(
    ranks: int, channels: int, max_rows: int, equal_shards: bool = True
) -> tuple[RowsLayout, ...]:
    """Return the row layouts of a model's norms: few or many rows, 2 or 4 bytes per element.

    There is only one element size unless shards are equal (PeerLayout).
    """
    few, narrow = ranks <= FEW_RANKS, channels <= FEWER_CHANNELS
    if channels > MAX_CHANNELS or channels % VECTOR or not (few or narrow):
        return ()
    parts = ceil_div(channels, PART_CHANNELS)
    item_sizes = ((2, 4) if equal_shards else (4,)) if few and narrow else (2,)
    shapes = [(min(FEW_ROWS, max_rows), parts)]
    if max_rows > FEW_ROWS:
        shapes.append((max_rows, 1))
    return tuple(
        RowsLayout(rows=rows, channels=channels, item_bytes=item_bytes, parts=parts)
        for rows, parts in shapes
        for item_bytes in item_sizes
    )


def rows_warps(channels: int) -> int:
    """Return the warps of a block that holds a row: at most 16 channels per thread if possible."""
    return min(16, max(1, power_of_two(channels) // 512))


def num_words(elements: int, item_bytes: int) -> int:
    """Return the number of 32-bit words of so many elements.

    Kernels get it as an argument: for a computed value Triton does not know the divisibility by 16,
    and it would not vectorize the accesses.
    """
    return ceil_div(elements * item_bytes, 4)


def shard_elements(elements: int, ranks: int, item_bytes: int) -> int:
    """Return the elements that one rank sums in two shots, in whole vectors of 16 bytes."""
    vector = 16 // item_bytes
    return ceil_div(ceil_div(elements, ranks), vector) * vector
