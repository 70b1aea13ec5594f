"""Tiles of the adapters' kernels, in plain Python. Legend as in weights.py.

A block computes the rows of one adapter in a tile of rows. There is a block for each slot; or, if a
tile has fewer rows than there are slots, for each row, and the block of an adapter's first row does
the work. Blocks without work end immediately, which is all that rows without an adapter and unused
slots cost.
"""

from dataclasses import dataclass, replace

from qkernels.gpu.config import ceil_div
from qkernels.gpu.workspace import WORKSPACE_COUNTERS

RANK_BLOCK = 16  # the least that tensor cores multiply
FEW_ROWS = 128  # up to which kernels start while the one before ends (gpu/pdl.py)
MAX_SLICES = 3
PARTS_LEFT = 16  # at most, to what reads them
FIXED_PARTS = 8  # of K for every number of rows, in fixed order
WIDE_OUTPUTS = 256  # of a tile of 16 rows, for many rows
BLOCKS_WANTED = 128  # of shrink: about one for each SM


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkConfig:
    """One launch of lora_shrink."""

    rows: int  # of a tile
    inputs: int  # of one product
    parts: int  # of K, each in a block of its own
    adds_parts: bool  # in the last block to end; else that is left to what reads them
    by_row: bool  # `owns_by_row`
    warps: int
    by_warp: bool  # each warp multiplies some of the inputs, else some of the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandConfig:
    """One launch of lora_expand_."""

    rows: int
    outputs: int
    by_row: bool
    warps: int


def tile_rows(T: int) -> int:
    """Rows of a tile. A tile reads its adapters' matrices once."""
    return 16 if T <= 16 else 32 if T <= 32 else 64


def owns_by_row(T: int, num_slots: int, rows: int | None = None) -> bool:
    """True: a tile (of `tile_rows`) has a block for each row; False: for each slot."""
    return min(T, rows or tile_rows(T)) < num_slots


def num_owners(T: int, num_slots: int, rows: int | None = None) -> int:
    """Blocks that look for their rows in one tile (of `tile_rows`)."""
    return min(T, rows or tile_rows(T), num_slots)


def shrink_config(
    T: int, K: int, S: int, R: int, num_slots: int, *, leaves_parts: bool = False
) -> ShrinkConfig:
    """Tile for T rows of K inputs, S linears side by side, slots of R ranks.

    `leaves_parts`: the consumer of the result can add its parts; used for few rows only.
    """
    rows = tile_rows(T)
    by_warp = rows <= 32
    warps = 8 if by_warp and K > 8192 else 4
    # [rows, inputs] of x are in registers
    inputs = (2048 * warps if by_warp else 4096) // rows
    groups = ceil_div(T, rows) * S * ceil_div(R, RANK_BLOCK)  # of parts, for each owner
    adds_parts = not (leaves_parts and rows <= 32)
    most = min(PARTS_LEFT if T <= FEW_ROWS else 4, BLOCKS_WANTED // groups)
    if not adds_parts and rows > 16:
        most = min(most, 8)  # for more the products of as many rows have no registers
    if adds_parts and groups * num_owners(T, num_slots) > WORKSPACE_COUNTERS:
        most = 1
    steps = ceil_div(K, inputs)
    steps_of_part = ceil_div(steps, max(1, most))
    return ShrinkConfig(
        rows=rows,
        inputs=inputs,
        parts=ceil_div(steps, steps_of_part),
        adds_parts=adds_parts,
        by_row=owns_by_row(T, num_slots),
        warps=warps,
        by_warp=by_warp,
    )


def expand_config(T: int, N: int, num_slots: int) -> ExpandConfig:
    """For T rows of N outputs, so many slots."""
    rows = tile_rows(T)
    outputs = 64 if N <= 8192 else 4096 // rows
    by_row = owns_by_row(T, num_slots)
    return ExpandConfig(rows=rows, outputs=max(64, outputs), by_row=by_row, warps=4)


def fixed_shrink_config(T: int, K: int, S: int, R: int, num_slots: int) -> ShrinkConfig:
    """Tile in which a row's sum has one order: T changes the grid alone, and K its parts.

    The parts are added in order, by the kernel or, where it has too few counters, after it.
    """
    few = shrink_config(1, K, S, R, num_slots)
    steps = ceil_div(K, few.inputs)
    groups = ceil_div(T, few.rows) * S * ceil_div(R, RANK_BLOCK)
    return replace(
        few,
        parts=ceil_div(steps, ceil_div(steps, FIXED_PARTS)),
        adds_parts=groups * num_owners(T, num_slots, few.rows) <= WORKSPACE_COUNTERS,
        by_row=owns_by_row(T, num_slots, few.rows),
    )


def fixed_expand_config(T: int, N: int, num_slots: int) -> ExpandConfig:
    """Tiles of 16 rows for every T. An output's sum is one chain over ranks in any tile."""
    few = expand_config(1, N, num_slots)
    outputs = few.outputs if T <= FEW_ROWS else WIDE_OUTPUTS
    return replace(few, outputs=outputs, by_row=owns_by_row(T, num_slots, few.rows))


def whole_blocks(R: int) -> int:
    """Ranks that h has for those that read it in whole blocks."""
    return ceil_div(R, RANK_BLOCK) * RANK_BLOCK


def row_boundaries(
    max_rows: int, K: int, S: int, R: int, num_slots: int, *, fixed_order: bool = False
) -> list[int]:
    """The least T of every distinct compiled kernel for K inputs, up to `max_rows`."""
    found: dict[object, int] = {}
    if fixed_order:
        for T in range(1, max_rows + 1):
            found.setdefault((fixed_shrink_config(T, K, S, R, num_slots), T > FEW_ROWS), T)
        return sorted(found.values())
    for T in range(1, max_rows + 1):
        config = shrink_config(T, K, S, R, num_slots)
        leaving = shrink_config(T, K, S, R, num_slots, leaves_parts=True)
        found.setdefault((config, leaving), T)
        if config.parts == 1 and T > FEW_ROWS:
            break  # nothing changes any more
    return sorted(found.values())
