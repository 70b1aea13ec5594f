"""Configs of W4A16 for up to 64 rows on sm_90 (sm90_small_m.py), in plain Python.

A small cost model chooses the split-K factor and where the partial sums are reduced. Legend: M rows
of x, N outputs, K inputs. Times are microseconds on an H200, measured as in triton_config.py.
"""

import functools
import math
from dataclasses import dataclass

from qkernels.gpu.config import MAX_STAGES, SM_REGISTERS, CompileTimeConfig, ceil_div
from qkernels.gpu.workspace import WORKSPACE_FLOATS
from qkernels.operands.limbs import K_STEP, LIMBS_MAX_ROWS
from qkernels.operands.split_k import Consumer
from qkernels.wna16.layout import TILE_N, k_step

SMALL_M_ROWS = (8, 16, 32, 64)  # possible values of block_m
BLOCK_N = 2 * TILE_N  # two consumer warpgroups, one stored tile each


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallMConfig(CompileTimeConfig):
    """Launch config of sm90_small_m.py. A tile is 64 num_consumers outputs by block_m rows."""

    block_m: int  # at least M: one tile holds all rows
    split: int = 1  # split-K
    stages: int = 4  # pipeline stages, one K step of 128 inputs each
    blocks_per_sm: int = 2  # with 1, a block has twice the registers
    # griddepcontrol.launch_dependents before the producer's loop, not after it
    launch_dependents_first: bool = False
    # scale and round each weight before the product, for the same bits as sm90_large_m.py
    scales_weights: bool = False
    num_consumers: int = 2  # consumer warpgroups, 64 outputs each

    @property
    def k_subtile(self) -> int:
        """Inputs that are unpacked together."""
        return 32 if self.block_m == 64 and self.blocks_per_sm == 2 else 64

    @property
    def registers(self) -> int:
        """Registers per thread at launch; the warps redistribute them.

        They are shared by the consumers and four warps of the producer.
        """
        threads = 128 * (self.num_consumers + 1) * self.blocks_per_sm
        return min(168, SM_REGISTERS // threads // 8 * 8)

    @property
    def producer_registers(self) -> int:
        wide = self.blocks_per_sm == 1 or self.block_m == 64 or self.num_consumers == 1
        return 24 if wide else 40

    @property
    def consumer_registers(self) -> int:
        given = (self.num_consumers + 1) * self.registers - self.producer_registers
        return given // self.num_consumers // 8 * 8

    def tiles(self, N: int) -> int:
        return ceil_div(N, TILE_N * self.num_consumers)

    def fits(self, N: int, K: int) -> bool:
        """Return True if each split has a K step and the workspace holds all partial sums.

        Then the workspace also has a counter for each consumer of each tile.
        """
        floats = self.tiles(N) * self.split * TILE_N * self.num_consumers * self.block_m
        if self.split > 1 and floats > WORKSPACE_FLOATS:
            return False
        return self.split <= K // K_STEP


# The cost model, in microseconds.
_K_STEP_TIME = {8: 0.35, 16: 0.36, 32: 0.38, 64: 0.47}  # by block_m; K step of a block of an SM
_ONE_BLOCK_FACTOR = 1.25  # if an SM has one block: no other block hides its latencies
_WAVE_TIME = 3.0  # per wave of blocks after the first

# A last wave that fills this fraction of the GPU leaves no room for the next kernel's blocks (PDL).
_FULL_WAVE = 7 / 8
_FULL_WAVE_TIME = {8: 0.5, 16: 0.5, 32: 1.0, 64: 1.0}

# In-kernel reduction: (split + 3) * block_m * _REDUCE_ROW_TIME.
_REDUCE_ROW_TIME = 1 / 128

# Reduction in a norm, which has one block per row: split * N * _NORM_OUTPUT_TIME.
_NORM_OUTPUT_TIME = 1 / 12500
# Reduction in RoPE, which has many blocks:
# split * (_ROPE_SPLIT_TIME + block_m * N * _ROPE_SUM_TIME).
_ROPE_SPLIT_TIME = 0.08
_ROPE_SUM_TIME = 1 / 1.25e6
_UNREDUCED_GAIN = 0.45  # saved if the kernel does not reduce its splits
_MAX_SPLIT = 16

# With fewer K steps, dependents that are launched first take room from this kernel's own blocks.
_MIN_STEPS_TO_LAUNCH_FIRST = 10


@dataclass(frozen=True, slots=True)
class _CostModel:
    """The possible configs of one problem, and the predicted time of each."""

    block_m: int
    N: int
    K: int
    sm_count: int

    @property
    def k_steps(self) -> int:
        return self.K // K_STEP

    @property
    def blocks_per_sm(self) -> int:
        """1 for 64 rows if no SM has two tiles, so that the block has more registers; else 2."""
        return 1 if self.block_m == 64 and ceil_div(self.N, BLOCK_N) <= self.sm_count else 2

    def config(self, split: int) -> SmallMConfig:
        first = split == 1 or self.k_steps // split >= _MIN_STEPS_TO_LAUNCH_FIRST
        deep = self.blocks_per_sm == 1 or (self.block_m < 64 and split == 1)
        return SmallMConfig(
            block_m=self.block_m,
            split=split,
            stages=4 if deep or (self.block_m == 8 and first) else 3,
            blocks_per_sm=self.blocks_per_sm,
            launch_dependents_first=first,
        )

    def split_configs(self) -> list[SmallMConfig]:
        """Return all configs with split > 1 that can run."""
        configs = [self.config(split) for split in range(2, _MAX_SPLIT + 1)]
        return [each for each in configs if each.fits(self.N, self.K) and self._in_one_wave(each)]

    def _in_one_wave(self, config: SmallMConfig) -> bool:
        most = config.blocks_per_sm * self.sm_count
        return self.blocks_per_sm == 1 or self._work_tiles(config) <= most

    def _work_tiles(self, config: SmallMConfig) -> int:
        return config.tiles(self.N) * config.split

    def fills_last_wave(self, config: SmallMConfig) -> bool:
        """Return True if the last wave leaves little room for the next kernel's blocks."""
        work_tiles = self._work_tiles(config)
        one_each = work_tiles <= self.sm_count
        slots = self.sm_count * (1 if one_each else config.blocks_per_sm)
        return (work_tiles - 1) % slots + 1 > _FULL_WAVE * slots

    def unreduced_time(self, config: SmallMConfig) -> float:
        """Return the time until all splits have their sums."""
        work_tiles = self._work_tiles(config)
        per_sm = ceil_div(work_tiles, self.sm_count)
        one_block = per_sm == 1 or config.blocks_per_sm == 1
        k_steps = self.k_steps / config.split
        if one_block:
            k_steps = ceil_div(self.k_steps, config.split)
        waves = ceil_div(work_tiles, config.blocks_per_sm * self.sm_count)
        return (
            per_sm * k_steps * _K_STEP_TIME[self.block_m] * (_ONE_BLOCK_FACTOR if one_block else 1)
            + (waves - 1) * _WAVE_TIME
        )

    def time(self, config: SmallMConfig) -> float:
        """Return the time including the reduction in the kernel, by the last split to arrive."""
        if config.split == 1:
            return self.unreduced_time(config)
        full = _FULL_WAVE_TIME[self.block_m] if self.fills_last_wave(config) else 0.0
        reduction = (config.split + 3) * self.block_m * _REDUCE_ROW_TIME
        return self.unreduced_time(config) + full + reduction

    def time_with(self, consumer: Consumer, config: SmallMConfig) -> float:
        """Return the time without reduction, plus the time that the consumer needs for it."""
        one_block = config.blocks_per_sm == 1
        if self.fills_last_wave(config) and (consumer == "norm" or one_block):
            return math.inf  # the consumer's blocks read much and would wait for room, up to 3 us
        if consumer == "norm":
            read = self.N * _NORM_OUTPUT_TIME
        else:
            read = _ROPE_SPLIT_TIME + self.block_m * self.N * _ROPE_SUM_TIME
        return self.unreduced_time(config) + config.split * read - _UNREDUCED_GAIN


def _cost_model(M: int, N: int, K: int, group: int, bits: int, sm_count: int) -> _CostModel | None:
    block_m = next((block_m for block_m in SMALL_M_ROWS if block_m >= M), None)
    if block_m is None or bits != 4 or k_step(group) != K_STEP:
        return None
    return _CostModel(block_m, N, K, sm_count)


# Measured, us for qkv / o / gate_up / down; in brackets the fastest of the other variants:
# M = 8    6.3 (7.3) / 5.2 (6.5) / 18.6 (18.8) / 10.5 (11.8)     split 5 / 7 / 1 / 8
# M = 16   6.7 (8.2) / 5.6 (7.0) / 19.8 (22.0) / 11.6 (14.1)     the same
# M = 32   8.7 (10.6) / 7.8 (8.3) / 22.6 (29.7) / 14.8 (16.4)    split 4 / 7 / 1 / 8
# M = 64   11.5 (12.4) / 8.7 (10.1) / 31.7 (33.9) / 18.0 (21.2)  split 2 / 4 / 1 / 4
# At 32 rows, qkv with split 5 and o with split 4 take 8.4 and 7.1, but 10.3 and 9.7 together with
# the next kernel. The chosen splits take 9.7 and 9.2, because the next kernel's blocks find room.
# gate_up with 3 / 4 / 5 stages: 19.6 / 18.6 / 18.4 at 8 rows, 20.9 / 19.8 / 19.8 at 16. down with
# 2 / 3 / 4 stages: 12.0 / 10.6 / 10.5, 12.9 / 11.4 / 12.1. o with 2 / 3 / 4: 5.4 / 5.2 / 5.7.
@functools.lru_cache(maxsize=4096)
def default_small_m_config(
    M: int, N: int, K: int, group: int, bits: int, sm_count: int
) -> SmallMConfig | None:
    """Return the fastest config with an in-kernel reduction; None: M is too large."""
    model = _cost_model(M, N, K, group, bits, sm_count)
    if model is None:
        return None
    return min([model.config(1), *model.split_configs()], key=model.time)


# Measured us for qkv / o / gate_up / down (split 4 / 4 / 1 / 4); in brackets the default variant:
# M = 1    6.5 (5.8) / 5.6 (4.9) / 19.1 (17.6) / 12.7 (10.6)    limbs
# M = 16   6.7 (7.1) / 5.8 (5.9) / 19.8 (19.4) / 12.7 (11.4)
# M = 32   7.5 (9.1) / 6.4 (8.2) / 22.1 (21.5) / 13.3 (14.6)
# Two consumers for qkv / o / down at 1 row 9.4 / 6.9 / 20.6.
def scaled_config(M: int, N: int, K: int, split: int, sm_count: int) -> SmallMConfig:
    """Return the config with `scales_weights` for up to 64 rows and a given split.

    If K is split, tiles of 64 outputs spread evenly over the SMs. Otherwise there are many tiles,
    and tiles of 128 outputs read x half as often.
    """
    block_m = next(rows for rows in SMALL_M_ROWS if rows >= M)
    tiles = ceil_div(N, TILE_N) * split
    whole = split == 1 and tiles > 2 * sm_count
    blocks_per_sm = 2 if whole else min(3, max(1, ceil_div(tiles, sm_count)))
    return SmallMConfig(
        block_m=block_m,
        split=split,
        stages=(3 if block_m == 64 else 4) if whole or K // K_STEP // split >= 16 else 3,
        blocks_per_sm=blocks_per_sm,
        launch_dependents_first=whole,
        scales_weights=True,
        num_consumers=2 if whole else 1,
    )


@functools.lru_cache(maxsize=4096)
def split_k_config(
    consumer: Consumer, M: int, N: int, K: int, group: int, bits: int, sm_count: int
) -> SmallMConfig | None:
    """Return the config whose splits the consumer reduces; None: the in-kernel reduction is faster.

    For 18 shapes and 8 to 64 rows, the model's choice takes 1.3 percent longer than the best choice
    of split and reduction on average, at most 14 percent (measurements: notes/wna16.md).
    """
    model = _cost_model(M, N, K, group, bits, sm_count)
    if model is None or M <= LIMBS_MAX_ROWS:
        return None  # with so few rows the consumer makes limbs instead
    configs = model.split_configs()
    best = min(configs, key=lambda each: model.time_with(consumer, each), default=None)
    if best is None:
        return None
    in_kernel = model.time(default_small_m_config(M, N, K, group, bits, sm_count))
    return best if model.time_with(consumer, best) < in_kernel else None


def small_m_config_fault(
    config: SmallMConfig, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """Return why the kernel cannot run the config; None: it can."""
    if bits != 4 or k_step(group) != K_STEP:
        return f"takes 4 bits and groups divisible by 128, found {bits} and {group} of {K} inputs"
    if config.block_m not in SMALL_M_ROWS or config.block_m < M:
        return (
            f"block_m must be of {SMALL_M_ROWS} and at least the problem's {M} rows,"
            f" found {config.block_m}"
        )
    if config.split < 1 or not 1 <= config.stages <= MAX_STAGES:
        return (
            f"split must be at least 1 and stages 1 to {MAX_STAGES},"
            f" found {config.split} and {config.stages}"
        )
    most = 4 if config.num_consumers == 1 else 2
    if config.num_consumers not in (1, 2) or not 1 <= config.blocks_per_sm <= most:
        return f"blocks_per_sm must be 1 or 2, up to 4 with one consumer, found {config}"
    if not config.fits(N, K):
        return (
            f"each split needs a K step and all of them a workspace of {WORKSPACE_FLOATS} floats,"
            f" found split {config.split} of [{N}, {K}]"
        )
    return None
