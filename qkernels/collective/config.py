"""Which way a sum over ranks takes, by its size, and how buffers are laid out. Plain Python.

Legend: n ranks, M rows, C channels.
"""

from dataclasses import dataclass
from typing import Literal

from qkernels.gpu.config import ceil_div, power_of_two

Way = Literal["one_shot", "two_shot"]

MAX_RANKS = 8
# A tile of a flat message in bytes: 16 for each of 512 threads. A tile belongs to one block, and
# BLOCKS of them are resident at once on every GPU of at least 108 SMs.
TILE_BYTES = 8192
TILE_WARPS = 16
BLOCKS = 128

# Of a norm over few rows, each row is shared out over blocks of this many channels. It is what a
# block of norm_act_limbs.py makes limbs of: 8 steps of 128.
PART_CHANNELS = 1024
FEW_ROWS = 4
MOST_CHANNELS = 2**14  # of a row that a block's registers hold
# More ranks, or more channels, take more registers. Beyond these limits partial sums are rounded
# before they are sent; beyond both a norm is a kernel of its own.
FEW_RANKS = 4
FEWER_CHANNELS = 2**13
VECTOR = 8  # channels that lie together in 16 bytes: of rows, for aligned copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes of a message up to which a way is taken. Beyond the last, NCCL's bandwidth wins."""

    one_shot: int
    two_shot: int
    rows: int  # of a sum that a norm takes


KIB, MIB = 2**10, 2**20
# Ranks up to -> limits. One shot sends a message n - 1 times, two shots twice (n - 1) / n times:
# with two ranks the same bytes. Those of 2 are measured on H200s (notes/collective.md), those of 4
# and 8 are the crossings that are published for push kernels on H100s and H200s.
LIMITS = {
    2: Limits(one_shot=1 * MIB, two_shot=32 * MIB, rows=128),
    4: Limits(one_shot=384 * KIB, two_shot=16 * MIB, rows=32),
    8: Limits(one_shot=128 * KIB, two_shot=8 * MIB, rows=16),
}


def limits(ranks: int) -> Limits:
    """Those of so many ranks, at most MAX_RANKS."""
    return next(found for most, found in LIMITS.items() if ranks <= most)


def way(message_bytes: int, of: Limits) -> Way | None:
    """How a message of so many bytes is summed; None: not by this package."""
    if message_bytes <= of.one_shot:
        return "one_shot"
    return "two_shot" if message_bytes <= of.two_shot else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLayout:
    """A channel for rows: [3 phases, n - 1 senders, rows, channels] of one size of element."""

    rows: int
    channels: int
    item_bytes: int
    parts: int  # blocks that share a row

    @property
    def part(self) -> int:
        """Channels of a block."""
        return PART_CHANNELS if self.parts > 1 else self.channels

    def slot_bytes(self) -> int:
        return self.rows * self.channels * self.item_bytes


def rows_layouts(ranks: int, channels: int, max_rows: int) -> tuple[RowsLayout, ...]:
    """Those of a model's norms: few rows or more, of 2 or 4 bytes an element."""
    few, narrow = ranks <= FEW_RANKS, channels <= FEWER_CHANNELS
    if channels > MOST_CHANNELS or channels % VECTOR or not (few or narrow):
        return ()
    parts = ceil_div(channels, PART_CHANNELS)
    shapes = [(min(FEW_ROWS, max_rows), parts)]
    if max_rows > FEW_ROWS:
        shapes.append((max_rows, 1))
    return tuple(
        RowsLayout(rows=rows, channels=channels, item_bytes=item_bytes, parts=parts)
        for rows, parts in shapes
        for item_bytes in ((2, 4) if few and narrow else (2,))
    )


def rows_warps(channels: int) -> int:
    """Of a block that holds a row: 16 channels a thread at most, as far as there are warps."""
    return min(16, max(1, power_of_two(channels) // 512))


def num_words(elements: int, item_bytes: int) -> int:
    """Of 32 bits, that so many elements take.

    A number of its own for kernels: what they would compute, Triton would not know to be divisible
    by 16, and it would look at each word by itself.
    """
    return ceil_div(elements * item_bytes, 4)


def shard_elements(elements: int, ranks: int, item_bytes: int) -> int:
    """Of a message in two shots, what one rank sums: whole vectors of 16 bytes."""
    vector = 16 // item_bytes
    return ceil_div(ceil_div(elements, ranks), vector) * vector
