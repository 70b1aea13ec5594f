"""Tile sizes of the LoRA kernels, in plain Python. Legend: see weights.py.

A block computes the rows of one adapter within a tile of rows. A tile has one block per adapter
slot. If it has fewer rows than there are slots, it has one block per row, and the block of an
adapter's first row does the work. Blocks without work end immediately, so rows without an adapter
and unused slots cost almost nothing.
"""

from dataclasses import dataclass, replace

from qkernels.gpu.config import ceil_div
from qkernels.gpu.workspace import WORKSPACE_COUNTERS

RANK_BLOCK = 16  # smallest size that tensor cores multiply
FEW_ROWS = 128  # most rows with which kernels use PDL (gpu/pdl.py)
MAX_SLICES = 4  # most fused linears (q, k, v and a gate)
PARTS_LEFT = 16  # most split-K parts that shrink leaves to its consumer
FIXED_PARTS = 8  # split-K parts in fixed order, for every number of rows
WIDE_OUTPUTS = 256  # outputs of a tile of 16 rows in fixed order, for many rows
BLOCKS_WANTED = 128  # blocks of shrink: about one per SM


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkConfig:
    """Launch config of lora_shrink."""

    rows: int  # rows of a tile
    inputs: int  # inputs that one K step multiplies
    parts: int  # parts that K is split into; each one has its own block
    adds_parts: bool  # the last block to end adds the partial sums; False: the consumer does
    by_row: bool  # a tile has one block per row (owns_by_row)
    warps: int
    by_warp: bool  # each warp multiplies some of the inputs; False: some of the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandConfig:
    """Launch config of lora_expand_."""

    rows: int
    outputs: int
    by_row: bool
    warps: int


def tile_rows(T: int) -> int:
    """Return the rows of a tile. A tile reads the matrices of its adapters once."""
    return 16 if T <= 16 else 32 if T <= 32 else 64


def owns_by_row(T: int, num_slots: int, rows: int | None = None) -> bool:
    """Return True if a tile has one block per row; False: one per slot.

    `rows` are the rows of a tile, by default tile_rows(T).
    """
    return min(T, rows or tile_rows(T)) < num_slots


def num_owners(T: int, num_slots: int, rows: int | None = None) -> int:
    """Return the number of blocks that look for their rows in one tile.

    `rows` are the rows of a tile, by default tile_rows(T).
    """
    return min(T, rows or tile_rows(T), num_slots)


def shrink_config(
    T: int, K: int, S: int, R: int, num_slots: int, *, leaves_parts: bool = False
) -> ShrinkConfig:
    """Return the config for T rows of K inputs, S fused linears, `num_slots` slots of rank up to R.

    `leaves_parts`: the consumer can add the partial sums. This is used only for few rows.
    """
    rows = tile_rows(T)
    by_warp = rows <= 32
    warps = 8 if by_warp and K > 8192 else 4
    # registers hold [rows, inputs] of x
    inputs = (2048 * warps if by_warp else 4096) // rows
    groups = ceil_div(T, rows) * S * ceil_div(R, RANK_BLOCK)  # groups of parts, for each owner
    adds_parts = not (leaves_parts and rows <= 32)
    most = min(PARTS_LEFT if T <= FEW_ROWS else 4, BLOCKS_WANTED // groups)
    if not adds_parts and rows > 16:
        most = min(most, 8)  # with so many rows the product has no registers for more parts
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
    """Return the config for T rows of N outputs and `num_slots` adapter slots."""
    rows = tile_rows(T)
    outputs = 64 if N <= 8192 else 4096 // rows
    by_row = owns_by_row(T, num_slots)
    return ExpandConfig(rows=rows, outputs=max(64, outputs), by_row=by_row, warps=4)


def fixed_shrink_config(T: int, K: int, S: int, R: int, num_slots: int) -> ShrinkConfig:
    """Return a config that adds a row's inputs in the same order for every T.

    T only changes the grid; the number of parts depends on K. The parts are added in order: by the
    kernel, or after it if the workspace has too few counters.
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
    """Return a config with tiles of 16 rows for every T.

    An output is one chain of sums over the ranks, whatever the tile.
    """
    few = expand_config(1, N, num_slots)
    outputs = few.outputs if T <= FEW_ROWS else WIDE_OUTPUTS
    return replace(few, outputs=outputs, by_row=owns_by_row(T, num_slots, few.rows))


def whole_blocks(R: int) -> int:
    """Return R rounded up to whole blocks of ranks."""
    return ceil_div(R, RANK_BLOCK) * RANK_BLOCK


def row_boundaries(
    max_rows: int, K: int, S: int, R: int, num_slots: int, *, fixed_order: bool = False
) -> list[int]:
    """Return the smallest T, up to `max_rows`, of every distinct compiled kernel for K inputs."""
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
