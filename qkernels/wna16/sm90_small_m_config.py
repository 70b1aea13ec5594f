"""Tile choices of W4A16 of up to 64 rows, on the ring: problem sizes in, launch numbers out.

Plain Python.

Legend: M rows of x, N outputs, K inputs. Microseconds are an H200's, as in the config.
"""

import functools
import math
from dataclasses import dataclass

from qkernels.gpu.config import MAX_STAGES, CompileTimeConfig, ceil_div
from qkernels.gpu.workspace import WORKSPACE_FLOATS
from qkernels.operands.limbs import K_STEP, LIMBS_MAX_ROWS
from qkernels.operands.split_k import Consumer
from qkernels.wna16.layout import TILE_N, k_step

SMALL_M_ROWS = (8, 16, 32, 64)  # of x that a tile has place for
SMALL_M_TILE_N = 2 * TILE_N


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallMConfig(CompileTimeConfig):
    """How one product of up to 64 rows is cut for the ring (sm90_small_m.py)."""

    rows: int  # of x that it has place for
    split: int = 1  # parts of K
    stages: int = 4  # steps of 128 inputs on their way
    alone: bool = False  # one block on an SM, with twice the registers; else two
    launch_early: bool = False  # the next kernel is let in at the start, not when all is on its way

    @property
    def blocks_of_sm(self) -> int:
        return 1 if self.alone else 2

    @property
    def piece(self) -> int:
        """Inputs that are unpacked at once."""
        return 32 if self.rows == 64 and not self.alone else 64

    @property
    def registers(self) -> int:
        """Of a thread at launch, of 12 warps to a block."""
        return 168 if self.alone else 80

    @property
    def copy_registers(self) -> int:
        return 24 if self.alone or self.rows == 64 else 40

    @property
    def multiply_registers(self) -> int:
        """Where the warp that copies gives up its own."""
        return (3 * self.registers - self.copy_registers) // 2 // 8 * 8

    def tiles(self, N: int) -> int:
        return ceil_div(N, SMALL_M_TILE_N)

    def fits(self, N: int, K: int) -> bool:
        """Whether each part of K has a step, and sums a place in the workspace.

        Sums that have one have counters, too.
        """
        floats = self.tiles(N) * self.split * SMALL_M_TILE_N * self.rows
        if self.split > 1 and floats > WORKSPACE_FLOATS:
            return False
        return self.split <= K // K_STEP


# What the choice adds up, in microseconds: a step of an SM's blocks, by rows that there is place
# for; how many times as much where a block is alone on its SM; a round of blocks after the first.
_RING_STEP = {8: 0.35, 16: 0.36, 32: 0.38, 64: 0.47}
_RING_ALONE = 1.25
_RING_ROUND = 3.0

# Where blocks fill the GPU, the next kernels' start when they end.
_RING_FULL = 7 / 8  # of all places
_RING_FULL_COST = {8: 0.5, 16: 0.5, 32: 1.0, 64: 1.0}

# Parts that the last one adds: a row of a part, of three parts more than there are.
_RING_ADDED_ROW = 1 / 128

# Parts that the next operation adds as it reads them. A norm has one block for each row: one output
# of a part. Rotation has many: a part, and one sum of it.
_RING_READ_OUTPUT = 1 / 12500
_RING_READ_PART = 0.08
_RING_READ_SUM = 1 / 1.25e6
_RING_NOT_ADDED = 0.45  # what a product gains that has not to wait for its parts
_RING_MAX_SPLIT = 16
_RING_EARLY_STEPS = 10  # of a block: shorter ones are in the way of the next kernel's


@dataclass(frozen=True, slots=True)
class _Ring:
    """A product of up to 64 rows on the ring: its tiles, and what they take."""

    rows: int
    N: int
    K: int
    sm_count: int

    @property
    def steps(self) -> int:
        return self.K // K_STEP

    @property
    def alone(self) -> bool:
        """64 rows want more registers than half of an SM's, and get them if none has two tiles."""
        return self.rows == 64 and ceil_div(self.N, SMALL_M_TILE_N) <= self.sm_count

    def tile(self, split: int) -> SmallMConfig:
        launch_early = split == 1 or self.steps // split >= _RING_EARLY_STEPS
        many = self.alone or (self.rows < 64 and split == 1) or (self.rows == 8 and launch_early)
        return SmallMConfig(
            rows=self.rows,
            split=split,
            stages=4 if many else 3,
            alone=self.alone,
            launch_early=launch_early,
        )

    def in_parts(self) -> list[SmallMConfig]:
        """All tiles that cut K and can run."""
        tiles = [self.tile(split) for split in range(2, _RING_MAX_SPLIT + 1)]
        return [tile for tile in tiles if tile.fits(self.N, self.K) and self._is_sound(tile)]

    def _is_sound(self, tile: SmallMConfig) -> bool:
        return self.alone or self._units(tile) <= tile.blocks_of_sm * self.sm_count

    def _units(self, tile: SmallMConfig) -> int:
        return tile.tiles(self.N) * tile.split

    def fills(self, tile: SmallMConfig) -> bool:
        """Whether the last round of blocks leaves little room for the next kernels'."""
        units = self._units(tile)
        places = self.sm_count * (1 if units <= self.sm_count else tile.blocks_of_sm)
        return (units - 1) % places + 1 > _RING_FULL * places

    def product(self, tile: SmallMConfig) -> float:
        """Microseconds until all parts have their sums."""
        units = self._units(tile)
        of_sm = ceil_div(units, self.sm_count)
        alone = of_sm == 1 or tile.alone
        steps = ceil_div(self.steps, tile.split) if alone else self.steps / tile.split
        rounds = ceil_div(units, tile.blocks_of_sm * self.sm_count)
        return (
            of_sm * steps * _RING_STEP[self.rows] * (_RING_ALONE if alone else 1)
            + (rounds - 1) * _RING_ROUND
        )

    def added_by_last(self, tile: SmallMConfig) -> float:
        """Microseconds of a product whose last part adds all."""
        if tile.split == 1:
            return self.product(tile)
        full = _RING_FULL_COST[self.rows] if self.fills(tile) else 0.0
        return self.product(tile) + full + (tile.split + 3) * self.rows * _RING_ADDED_ROW

    def added_by(self, consumer: Consumer, tile: SmallMConfig) -> float:
        """Microseconds of a product in parts, and what `reader` takes longer to add them."""
        if self.fills(tile) and (consumer == "norm" or tile.alone):
            return math.inf  # blocks that read much and wait for room: up to 3 us
        if consumer == "norm":
            read = self.N * _RING_READ_OUTPUT
        else:
            read = _RING_READ_PART + self.rows * self.N * _RING_READ_SUM
        return self.product(tile) + tile.split * read - _RING_NOT_ADDED


def _ring(M: int, N: int, K: int, group: int, bits: int, sm_count: int) -> _Ring | None:
    rows = next((rows for rows in SMALL_M_ROWS if rows >= M), None)
    if rows is None or bits != 4 or k_step(group) != K_STEP:
        return None
    return _Ring(rows, N, K, sm_count)


# Measured, us for qkv / o / gate_up / down, in brackets what was fastest before:
# M = 8    6.3 (7.3) / 5.2 (6.5) / 18.6 (18.8) / 10.5 (11.8)     split 5 / 7 / 1 / 8
# M = 16   6.7 (8.2) / 5.6 (7.0) / 19.8 (22.0) / 11.6 (14.1)     the same
# M = 32   8.7 (10.6) / 7.8 (8.3) / 22.6 (29.7) / 14.8 (16.4)    split 4 / 7 / 1 / 8
# M = 64   11.5 (12.4) / 8.7 (10.1) / 31.7 (33.9) / 18.0 (21.2)  split 2 / 4 / 1 / 4
# 32 rows of qkv and o in 5 and 4 parts take 8.4 and 7.1, but with the next operation 10.3 and 9.7,
# where these take 9.7 and 9.2: it finds room.
# Stages of gate_up 3 / 4 / 5: 19.6 / 18.6 / 18.4 at 8 rows, 20.9 / 19.8 / 19.8 at 16; of down 2 / 3
# / 4: 12.0 / 10.6 / 10.5, 12.9 / 11.4 / 12.1; of o 5.4 / 5.2 / 5.7.
@functools.lru_cache(maxsize=4096)
def default_small_m_config(
    M: int, N: int, K: int, group: int, bits: int, sm_count: int
) -> SmallMConfig | None:
    """The tile for up to 64 rows; None: there are more, or it cannot."""
    ring = _ring(M, N, K, group, bits, sm_count)
    if ring is None:
        return None
    return min([ring.tile(1), *ring.in_parts()], key=ring.added_by_last)


@functools.lru_cache(maxsize=4096)
def split_k_config(
    consumer: Consumer, M: int, N: int, K: int, group: int, bits: int, sm_count: int
) -> SmallMConfig | None:
    """The tile of a product whose parts `reader` adds; None: the last part adds them faster.

    The costs above choose, of 18 shapes and 8 to 64 rows, what takes 1.3 percent longer than the
    best of all splits and both ways (README.md has some of the measurements); 14 at most.
    """
    ring = _ring(M, N, K, group, bits, sm_count)
    if ring is None or M <= LIMBS_MAX_ROWS:
        return None  # of few rows the reader makes limbs
    best = min(ring.in_parts(), key=lambda tile: ring.added_by(consumer, tile), default=None)
    if best is None:
        return None
    last = ring.added_by_last(default_small_m_config(M, N, K, group, bits, sm_count))
    return best if ring.added_by(consumer, best) < last else None


def small_m_config_fault(
    tile: SmallMConfig, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """None: the kernel can run it."""
    if bits != 4 or k_step(group) != K_STEP:
        return f"takes 4 bits and groups divisible by 128, found {bits} and {group} of {K} inputs"
    if tile.rows not in SMALL_M_ROWS or tile.rows < M:
        return (
            f"rows must be of {SMALL_M_ROWS} and at least the {M} of the problem, found {tile.rows}"
        )
    if tile.split < 1 or not 1 <= tile.stages <= MAX_STAGES:
        return (
            f"split must be at least 1 and stages 1 to {MAX_STAGES},"
            f" found {tile.split} and {tile.stages}"
        )
    if not tile.fits(N, K):
        return f"the workspace does not hold {tile.split} parts of [{N}, {K}], or some have no step"
    return None
