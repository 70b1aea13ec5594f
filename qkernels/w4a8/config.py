"""Default launch configs of the W4A8 products, in Triton and for sm_90.

Legend: M rows of x, N outputs, K inputs.
"""

import functools
from dataclasses import dataclass, replace

from qkernels.gpu.config import (
    HOPPER_SHARED_BYTES,
    SM_REGISTERS,
    WARPGROUP_ROWS,
    CompileTimeConfig,
    ceil_div,
    is_power,
    launch_fault,
    power_of_two,
    split_fault,
)
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.w4a8.layout import K_STEP, TILE_N

MAX_SPLIT = 16
# the sm_90 kernel's plans for weights whose scales are multiples of one number in each row
MULTIPLES = "sm90_multiples"


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A8TritonConfig:
    """Launch config of triton_gemm.py. The grid is [tiles of outputs, split, tiles of rows]."""

    block_m: int
    block_n: int = 64
    split: int = 1  # split-K
    warps: int = 4
    stages: int = 4
    pdl: bool = True  # programmatic dependent launch
    use_tma: bool = True  # load x by TMA


def default_triton_config(M: int, N: int, K: int, block_k: int, sm_count: int) -> W4A8TritonConfig:
    """Return the config for M >= 1 rows, in K steps of block_k inputs."""
    block_m = min(128, max(16, power_of_two(M)))
    tiles = ceil_div(N, 128) * ceil_div(M, block_m)
    block_n = 128 if tiles >= 1.5 * sm_count or M > 256 else 64
    tiles = ceil_div(N, block_n) * ceil_div(M, block_m)
    split = 1
    if M <= 256:
        steps = K // block_k
        fits = (
            split
            for split in (8, 6, 4, 3, 2)
            if steps // split >= 8
            and split * tiles <= 2 * sm_count
            and split * M * N <= WORKSPACE_FLOATS
            and tiles <= WORKSPACE_COUNTERS
        )
        split = next(fits, 1)
    return W4A8TritonConfig(
        block_m=block_m,
        block_n=block_n,
        split=split,
        warps=8 if block_m == 128 else 4,
        stages=3 if block_m >= 64 else 4,
        pdl=M <= 256,
        use_tma=block_m > 16,
    )


def triton_config_fault(
    config: W4A8TritonConfig, *, M: int, N: int, K: int, group: int, integers: bool = True
) -> str | None:
    """Return why the kernel cannot run the config; None: it can."""
    if config.block_n not in (64, 128):
        return f"block_n must be 64 or 128, found {config.block_n}"
    tiles = ceil_div(N, config.block_n) * ceil_div(M, max(1, config.block_m))
    # K_STEP is the longest K step; with shorter ones there are more steps
    return launch_fault(
        config.block_m, config.warps, config.stages, least=16, most=256
    ) or split_fault(config.split, ceil_div(K, K_STEP), tiles, M * N)


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A8Sm90Config(CompileTimeConfig):
    """Launch config of sm90.py: blocks are resident and compute several output tiles each.

    A tile has 64 outputs per consumer warpgroup by block_b rows of x. Field names are those of
    W8A8Sm90Config with the weight as operand A, because w8a8's epilogue reads them.
    """

    num_consumers: int
    block_b: int
    split: int = 1  # split-K
    # reduce splits by reduce-scatter; False: in the last block to arrive
    reduce_scatter: bool = False
    group_a: int = 8  # output tiles that run at the same time, to share rows of x in the L2
    promotes: bool = True  # add sums to a float32 total after each step; False: integers to the end
    store_stages: int = 2  # store tiles in flight per consumer
    max_stages: int = 12
    blocks_per_sm: int = 1
    max_prefetch_stages: int = 8  # stages whose weights are loaded before griddepcontrol.wait
    # griddepcontrol.launch_dependents before the producer's loop, not after it
    launch_dependents_first: bool = False
    # load packed words of the next K step while this step is multiplied; if it `promotes`
    loads_ahead: bool = False

    consumer_rows = WARPGROUP_ROWS
    stored_rows = WARPGROUP_ROWS
    idle_rows = 0
    weight_is_a = True
    num_column_vectors = 1

    @property
    def stored_columns(self) -> int:
        """Rows of x in a tile that a block stores."""
        return self.block_b // self.split if self.reduce_scatter else self.block_b

    @property
    def store_width(self) -> int:
        """Rows of x per store tile."""
        return min(32 if self.num_consumers == 3 else 64, self.stored_columns)

    @property
    def stages(self) -> int:
        """As many as fit into shared memory with store tiles, column vectors and barriers."""
        # a consumer's codes, and up to four float32 scales per output
        of_consumer = WARPGROUP_ROWS * (K_STEP // 2 + 16)
        stage = self.num_consumers * of_consumer + self.block_b * K_STEP + 16
        shared = (HOPPER_SHARED_BYTES + 1024) // self.blocks_per_sm - 1024  # CUDA reserves 1 KB
        store_tile = WARPGROUP_ROWS * self.store_width * 2
        stores = self.num_consumers * self.store_stages * store_tile
        vectors = 0
        if self.column_vectors_in_shared:
            vectors = self.num_consumers * self.stored_columns * 4
        return min(self.max_stages, (shared - 1536 - stores - vectors) // stage)

    @property
    def prefetch_stages(self) -> int:
        return min(self.stages, self.max_prefetch_stages)

    @property
    def registers(self) -> int:
        """Registers per thread at launch; the producer's warpgroup then gives up its own."""
        threads = 128 * (self.num_consumers + 1) * self.blocks_per_sm
        return min(168, SM_REGISTERS // threads // 8 * 8)

    @property
    def producer_registers(self) -> int:
        return 24 if self.blocks_per_sm == 1 or self.num_consumers == 1 else 40

    @property
    def consumer_registers(self) -> int:
        given = (self.num_consumers + 1) * self.registers - self.producer_registers
        return min(240, given // self.num_consumers // 8 * 8)

    @property
    def _sum_registers(self) -> int:
        return WARPGROUP_ROWS * self.block_b * (2 if self.promotes else 1) // 128

    @property
    def column_vectors_in_shared(self) -> bool:
        """True if the scales of x's rows wait in shared memory until the product ends."""
        return self._sum_registers > 64

    @property
    def fits_thread(self) -> bool:
        """True if a consumer's thread has registers for its sums, codes and addresses."""
        return self._sum_registers + 40 <= self.consumer_registers

    def tiles(self, M: int, N: int) -> int:
        return ceil_div(N, self.num_consumers * TILE_N) * ceil_div(M, self.block_b)

    def fits(self, M: int, N: int, K: int, sm_count: int) -> bool:
        """Return True if the kernel can run this split on a GPU with `sm_count` SMs.

        Each split must have a K step, the workspace must hold all partial sums, and for a
        reduce-scatter all blocks must be resident.
        """
        if self.split == 1:
            return True
        max_blocks = sm_count * self.blocks_per_sm
        runs = not self.reduce_scatter or self.tiles(M, N) * self.split <= max_blocks
        return runs and self.split <= K // K_STEP and self.fits_workspace(M, N)

    def fits_workspace(self, M: int, N: int) -> bool:
        """Return True if the workspace has slots for all partial sums, and enough counters."""
        consumers = self.tiles(M, N) * self.num_consumers
        slots = consumers * self.split * WARPGROUP_ROWS * self.block_b
        return slots <= WORKSPACE_FLOATS and consumers <= WORKSPACE_COUNTERS


# For more than 64 rows: (config, time of a tile on an SM relative to a tile of 128 x 128). A
# product takes the time of its waves of tiles. The costs are estimates: those of w8a8/config.py
# plus the conversion and multiply-add of each sum in each K step, half as many cycles as its
# products.
_INTEGERS = (
    (W4A8Sm90Config(num_consumers=1, block_b=128, promotes=False), 0.72),
    (W4A8Sm90Config(num_consumers=2, block_b=128, promotes=False), 1.1),
    (W4A8Sm90Config(num_consumers=2, block_b=256, promotes=False), 2.0),
)
_PROMOTED = (
    (W4A8Sm90Config(num_consumers=2, block_b=64), 0.75),
    (W4A8Sm90Config(num_consumers=2, block_b=128, group_a=16, loads_ahead=True), 1.15),
)


def sums_are_promoted(K: int, group: int, integers: bool) -> bool:
    """Return True if sums are added to a float32 total: with groups, and for float8 products."""
    return group != K or not integers


def _large_m_table(K: int, group: int, integers: bool) -> tuple[tuple[W4A8Sm90Config, float], ...]:
    return _PROMOTED if sums_are_promoted(K, group, integers) else _INTEGERS


def default_sm90_config(
    M: int, N: int, K: int, group: int, sm_count: int, integers: bool
) -> W4A8Sm90Config:
    """Return the config for M >= 1 rows."""
    promotes = sums_are_promoted(K, group, integers)
    if M <= 64:
        return _small_m_config(max(16, power_of_two(M)), N, K, sm_count, promotes)

    def time(row: tuple[W4A8Sm90Config, float]) -> float:
        config, cost = row
        return ceil_div(config.tiles(M, N), sm_count) * cost

    config, _ = min(_large_m_table(K, group, integers), key=time)
    scattered = replace(config, split=2, reduce_scatter=True)
    worth = (56 if promotes else 32) <= K // K_STEP
    return scattered if worth and scattered.fits(M, N, K, sm_count) else config


def fixed_order_config(
    M: int, N: int, K: int, group: int, sm_count: int, integers: bool
) -> W4A8Sm90Config:
    """Return a batch-invariant config: float32 totals are never split."""
    config = default_sm90_config(M, N, K, group, sm_count, integers)
    if not config.promotes:
        return config  # integer sums are exact in any order
    config = replace(config, split=1, reduce_scatter=False)
    if M <= 64 and config.tiles(M, N) <= sm_count:  # tiles of 64 outputs, for more SMs
        config = replace(config, num_consumers=1, blocks_per_sm=2)
    return config


# block_b -> microseconds per K step of one of an SM's two blocks. A step loads the same weights as
# wna16/sm90_small_m, and half as many bytes of x.
_K_STEP_TIME = {16: 0.35, 32: 0.36, 64: 0.42}
_ONE_BLOCK_FACTOR = 1.25  # if an SM has one block: no other block hides its latencies
_WAVE_TIME = 3.0
_FULL_WAVE = 7 / 8  # above this fraction of a wave, the next kernel's blocks find no room
_FULL_WAVE_TIME = 0.5
_REDUCE_ROW_TIME = 1 / 128  # times (split + 3) and block_b


@functools.lru_cache(maxsize=4096)
def _small_m_config(block_b: int, N: int, K: int, sm_count: int, promotes: bool) -> W4A8Sm90Config:
    """Return the config for few rows with the split-K that is predicted as fastest.

    It has two consumer warpgroups per block and two blocks per SM.
    """
    two = W4A8Sm90Config(num_consumers=2, block_b=block_b, promotes=promotes)
    two = replace(two, max_stages=6, blocks_per_sm=2 if block_b < 64 else 1)
    if block_b == 64 and two.tiles(1, N) > sm_count:
        two = replace(two, num_consumers=1, blocks_per_sm=2)

    def time(config: W4A8Sm90Config) -> float:
        work = config.tiles(1, N) * config.split
        per_sm = ceil_div(work, sm_count)
        one_block = per_sm == 1 or config.blocks_per_sm == 1
        steps = K // K_STEP / config.split
        if one_block:
            steps = ceil_div(K // K_STEP, config.split)
        slots = config.blocks_per_sm * sm_count
        step = _K_STEP_TIME[block_b] * (1 + config.num_consumers) / 3
        total = per_sm * steps * step * (_ONE_BLOCK_FACTOR if one_block else 1)
        total += (ceil_div(work, slots) - 1) * _WAVE_TIME
        if config.split > 1:
            room = sm_count if work <= sm_count else slots
            total += _FULL_WAVE_TIME * ((work - 1) % room + 1 > _FULL_WAVE * room)
            total += (config.split + 3) * block_b * _REDUCE_ROW_TIME
        return total

    splits = [replace(two, split=split) for split in range(1, MAX_SPLIT + 1)]
    slots = two.blocks_per_sm * sm_count
    fit = [
        each
        for each in splits
        if each.split == 1
        or (each.fits(1, N, K, sm_count) and each.tiles(1, N) * each.split <= slots)
    ]
    best = min(fit, key=time)
    first = best.split == 1 or K // K_STEP // best.split >= 10
    return replace(best, launch_dependents_first=first)


def sm90_search_starts(M: int, K: int, group: int, integers: bool) -> list[W4A8Sm90Config]:
    """Return a config of every size that defaults are chosen from, where a search starts."""
    promotes = sums_are_promoted(K, group, integers)
    if M > 64:
        return [config for config, _ in _large_m_table(K, group, integers)]
    one = W4A8Sm90Config(
        num_consumers=1, block_b=max(16, power_of_two(M)), promotes=promotes, max_stages=6
    )
    two = replace(one, num_consumers=2)
    return [one, two, replace(one, blocks_per_sm=2), replace(two, blocks_per_sm=2)]


def sm90_config_fault(
    config: W4A8Sm90Config, *, M: int, N: int, K: int, group: int, integers: bool = True
) -> str | None:
    """Return why the kernel cannot run the config; None: it can, if `fits` is True."""
    if config.num_consumers not in (1, 2, 3):
        return f"num_consumers must be 1 to 3, found {config.num_consumers}"
    if not is_power(config.block_b, 16, 256):
        return f"block_b must be a power of two from 16 to 256, found {config.block_b}"
    if config.promotes != sums_are_promoted(K, group, integers):
        return f"promotes must be {not config.promotes} for this weight, found {config.promotes}"
    if not 1 <= config.split <= min(MAX_SPLIT, K // K_STEP):
        return f"split must be 1 to {MAX_SPLIT}, at most the steps of K, found {config.split}"
    if config.reduce_scatter and (config.split not in (2, 4) or config.stored_columns < 16):
        return f"reduce_scatter needs 2 or 4 splits with 16 columns each, found {config}"
    if config.store_stages not in (1, 2) or config.blocks_per_sm not in (1, 2):
        return f"store_stages and blocks_per_sm must be 1 or 2, found {config}"
    if config.max_prefetch_stages < 1 or not 1 <= config.group_a <= 64:
        return f"max_prefetch_stages must be at least 1 and group_a 1 to 64, found {config}"
    if config.stages < 3 or not config.fits_thread:
        return f"an SM's registers or shared memory do not hold {config}"
    if config.split > 1 and not config.fits_workspace(M, N):
        return f"the workspace does not hold {config.split} splits of [{M}, {N}]"
    return None
