"""Tiles of the adapters' kernels, in plain Python. Legend as in weights.py.

A block takes a tile of rows and those of them that one adapter has. There is a block for each slot,
or, where a tile has fewer rows than there are slots, for each row, which goes on if it is the first
of its adapter. What has nothing to do ends at once, so that neither rows without an adapter nor
slots that nobody uses cost more than that.
"""

from dataclasses import dataclass

from qkernels.gpu.config import ceil_div
from qkernels.gpu.workspace import WORKSPACE_COUNTERS

RANK_BLOCK = 16  # the least that tensor cores multiply
FEW_ROWS = 128  # up to which kernels start while the one before ends (gpu/pdl.py)
MAX_SLICES = 3
BLOCKS_WANTED = 128  # of shrink: about one for each SM


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkConfig:
    """One launch of lora_shrink."""

    rows: int  # of a tile
    inputs: int  # of one product
    parts: int  # of K, each in a block of its own, the last of which adds them; a power of two
    by_row: bool  # `owns_by_row`
    warps: int


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


def owns_by_row(T: int, num_slots: int) -> bool:
    """Whether a tile has a block for each row, and not for each slot."""
    return min(T, tile_rows(T)) < num_slots


def num_owners(T: int, num_slots: int) -> int:
    """Blocks that look for their rows in one tile."""
    return min(T, tile_rows(T), num_slots)


def shrink_config(T: int, K: int, S: int, R: int, num_slots: int) -> ShrinkConfig:
    """For T rows of K inputs, S linears beside each other, slots of R ranks."""
    rows = tile_rows(T)
    inputs = 4096 // rows  # [rows, inputs] of x are in registers
    groups = ceil_div(T, rows) * S * ceil_div(R, RANK_BLOCK)  # of parts, for each owner
    most = min(16 if T <= FEW_ROWS else 4, ceil_div(K, inputs), BLOCKS_WANTED // groups)
    if groups * num_owners(T, num_slots) > WORKSPACE_COUNTERS:
        most = 1
    parts = 1
    while 2 * parts <= most:
        parts *= 2
    by_row = owns_by_row(T, num_slots)
    return ShrinkConfig(rows=rows, inputs=inputs, parts=parts, by_row=by_row, warps=4)


def expand_config(T: int, N: int, num_slots: int) -> ExpandConfig:
    """For T rows of N outputs, so many slots."""
    rows = tile_rows(T)
    outputs = 64 if N <= 8192 else 4096 // rows
    by_row = owns_by_row(T, num_slots)
    return ExpandConfig(rows=rows, outputs=max(64, outputs), by_row=by_row, warps=4)


def row_boundaries(max_rows: int, K: int, S: int, R: int, num_slots: int) -> list[int]:
    """The least T of every distinct compiled kernel for K inputs, up to `max_rows`."""
    found: dict[object, int] = {}
    for T in range(1, max_rows + 1):
        config = shrink_config(T, K, S, R, num_slots)
        found.setdefault(config, T)
        if config.parts == 1 and T > FEW_ROWS:
            break  # nothing changes any more
    return sorted(found.values())
