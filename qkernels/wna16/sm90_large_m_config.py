"""Configs of W4A16 and W8A16 for many rows on sm_90 (sm90_large_m.py), in plain Python.

Legend: M rows of x, N outputs, K inputs. Times are microseconds on an H200, measured as in
triton_config.py.
"""

import functools
from dataclasses import dataclass, replace

from qkernels.gpu.config import (
    HOPPER_SHARED_BYTES,
    MAX_STAGES,
    SM_REGISTERS,
    CompileTimeConfig,
    ceil_div,
)
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.operands.limbs import K_STEP
from qkernels.wna16.layout import TILE_N, k_step, padded_n
from qkernels.wna16.triton_config import default_triton_config

_PRODUCER_REGISTERS = 24  # per thread of a producer that gives registers to the consumers


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeMConfig(CompileTimeConfig):
    """Launch config of sm90_large_m.py. A tile is 64 num_consumers outputs by block_m rows.

    A block computes several tiles or, with split-K, one split of one tile.
    """

    blocks: int  # blocks of the grid: at most one per SM
    bits: int = 4  # bits of a code
    num_consumers: int = 2  # consumer warpgroups, 64 outputs each
    block_m: int = 128
    split: int = 1  # split-K with a reduce-scatter: each split of each tile has its own block
    tail_split: bool = False  # cut tiles of the last, partial wave in two halves by rows
    # A tile's K steps are summed in this many segments, each from zero, which are added in order.
    # The bits equal those of split-K with as many splits.
    segments: int = 1

    @property
    def compiled(self) -> "LargeMConfig":
        """The config without its grid: one compiled kernel computes any number of tiles."""
        return replace(self, blocks=0)

    @property
    def mma_across_steps(self) -> bool:
        """True if wgmmas stay in flight between K steps; then warps keep their registers.

        In such a loop ptxas waits for each wgmma (warning C7512) if any warp of the block, also the
        producer, has fewer than about 128 registers.
        """
        return self.num_consumers == 2 and self.block_m <= 128

    @property
    def k_subtile(self) -> int:
        """Inputs of one wgmma: operand A takes 16 registers for 64 inputs, 8 for 32."""
        return 64 if self.num_consumers == 2 and not self.mma_across_steps else 32

    @property
    def mma_in_flight(self) -> int:
        """Wgmmas in flight while the next one's weights are unpacked."""
        return 2 if self.mma_across_steps else 1

    @property
    def store_rows(self) -> int:
        """Rows of x in a store tile."""
        return 32 if self.block_m == 256 else self.block_m // self.split

    @property
    def store_stages(self) -> int:
        """Buffers per consumer: a store tile is written while TMA reads the previous one."""
        return 2 if self.store_rows < self.block_m // self.split else 1

    @property
    def stages_per_step(self) -> int:
        """Stages that x takes in a K step. x of 256 rows is 64 KB, too much for one stage."""
        return 2 if self.block_m == 256 else 1

    @property
    def stages(self) -> int:
        """Stages of the pipeline of x: as many as fit into shared memory."""
        stores = self.num_consumers * self.store_stages * TILE_N * self.store_rows * 2
        packed = self.num_consumers * TILE_N * K_STEP * self.bits // 8
        x = self.block_m * K_STEP * 2 // self.stages_per_step

        def num_bytes(stages: int) -> int:
            return stages * x + ceil_div(stages, self.stages_per_step) * packed + stores + 512

        return max(n for n in range(1, MAX_STAGES + 1) if num_bytes(n) <= HOPPER_SHARED_BYTES)

    @property
    def weight_slots(self) -> int:
        """K steps whose packed weights are in flight."""
        return ceil_div(self.stages, self.stages_per_step)

    @property
    def registers(self) -> int:
        """Registers per thread at launch, for the consumers and four warps of the producer."""
        return SM_REGISTERS // (128 * (self.num_consumers + 1)) // 8 * 8

    @property
    def producer_registers(self) -> int:
        return self.registers if self.mma_across_steps else _PRODUCER_REGISTERS

    @property
    def consumer_registers(self) -> int:
        left = (self.num_consumers + 1) * self.registers - self.producer_registers
        return left // self.num_consumers // 8 * 8

    def tiles(self, M: int, N: int) -> int:
        return ceil_div(N, TILE_N * self.num_consumers) * ceil_div(M, self.block_m)

    def on(self, M: int, N: int, sm_count: int) -> "LargeMConfig":
        """Return this config with the blocks that M rows take on a GPU with `sm_count` SMs."""
        work_tiles = self.tiles(M, N) * self.split * (2 if self.tail_split else 1)
        return replace(self, blocks=min(work_tiles, sm_count, self.max_blocks))

    @property
    def keeps_total(self) -> bool:
        """True if a thread has registers for both its sums and the total of earlier segments."""
        return self.block_m <= 128

    @property
    def max_blocks(self) -> int:
        """Most blocks whose segment totals fit into the workspace."""
        if self.segments == 1 or self.keeps_total:
            return WORKSPACE_FLOATS
        return WORKSPACE_FLOATS // (self.num_consumers * TILE_N * self.block_m)

    def fits(self, M: int, N: int, K: int) -> bool:
        """Return True if each split has a K step, a resident block, and room in the workspace."""
        if self.split == 1:
            return self.segments <= K // K_STEP and self.blocks <= self.max_blocks
        floats = self.tiles(M, N) * self.split * self.num_consumers * TILE_N * self.block_m
        return (
            self.split <= K // K_STEP
            and self.tiles(M, N) * self.split <= self.blocks
            and floats <= WORKSPACE_FLOATS
            and self.tiles(M, N) * self.num_consumers <= WORKSPACE_COUNTERS
        )


# bits -> (num_consumers, block_m) -> us per K step
_K_STEP_TIME = {
    4: {(2, 64): 0.5, (2, 128): 0.65, (3, 128): 0.99, (2, 256): 1.21},
    8: {(2, 64): 0.58, (2, 128): 0.72, (3, 128): 1.1, (2, 256): 1.27},
}

LARGE_M_SIZES = tuple(_K_STEP_TIME[4])
LARGE_M_SPLITS = (1, 2, 4)
_START_TIME = 5.2  # us for the launch, the first loads and the last store
_NEXT_TILE_TIME = 2.5  # us between two tiles of a block
_REDUCE_SCATTER_TIME = 6e-3  # us per row of a consumer's sums

# us of triton_gemm; K steps are those of tiles of 64 outputs by up to 64 rows, and by 128
_TRITON_START_TIME = 3.6
_TRITON_K_STEP_TIME = {4: {64: 0.55, 128: 0.95}, 8: {64: 0.65, 128: 1.15}}
_TRITON_SPLIT_TIME = 0.3  # us per split
_CUBLAS_FLOPS = 770e6  # per us, after dequantizing
_DEQUANTIZE_BYTES = 3.7e6  # per us
_MIN_ROWS = 33  # with fewer rows most rows of a tile would be empty


# Measured us for qkv / o / gate_up / down, each followed by num_consumers, block_m, split, and t
# for tail_split ("-": this kernel is not chosen). In brackets: triton_gemm.
# M = 64    12.8 (13.3) - / 10.1 (11.9) 2,64,4 / 34.5 (38.8) - / 21.4 (22.4) 2,64,4
# M = 128   16.4 (17.9) 3,128,4 / 12.2 (14.3) 2,128,4 / 50.8 (56.9) 2,128 / 26.9 (33.3) 2,128,4
# M = 256   23.2 (26.9) 3,128,2 / 17.0 (21.2) 2,128,2 / 86.0 2,256 / 44.0 (53.4) 2,256,4
# M = 512   37.0 3,128 / 26.4 (27.5) 2,128 / 158.1 2,256,t / 78.7 (94.2) 2,256,2
# M = 1024  68.9 (80.4) 2,256,t / 43.8 2,256 / 302.3 2,256 / 144.5 2,256
# M = 4096  304.6 2,256 / 203.8 2,256 / 1392 2,256,t / 689 2,256
# (With 4 bits and up to 64 rows, sm90_small_m is faster and is chosen first.)
# 8 bits, with the same tiles except for gate_up at 64 rows:
# M = 64    14.8 - / 12.0 / 45.7 (49.0) 2,64 / 26.6 (28.1)
# M = 128   18.5 (22.5) / 13.3 (16.9) / 57.6 (68.7) / 31.3 (38.6)
# M = 256   25.3 (32.0) / 18.7 (23.7) / 90.2 (136.3) / 47.3 (62.1)
# M = 512   40.5 (63.0) / 28.3 (32.8) / 172.0 (253.2) / 82.4 (111.7)
@functools.lru_cache(maxsize=4096)
def default_large_m_config(
    M: int, N: int, K: int, group: int, bits: int, sm_count: int
) -> LargeMConfig | None:
    """Return the fastest config for M rows; None: use another kernel."""
    if k_step(group) != K_STEP or M < _MIN_ROWS:
        return None
    best, least = None, other_time(M, N, K, group, bits, sm_count)
    for num_consumers, block_m in LARGE_M_SIZES:
        if block_m == 64 and M > 64:
            continue
        for split, tail_split in ((1, False), (2, False), (4, False), (1, True)):
            if tail_split and block_m < 256:
                continue
            config = LargeMConfig(
                blocks=sm_count,
                bits=bits,
                num_consumers=num_consumers,
                block_m=block_m,
                split=split,
                tail_split=tail_split,
            )
            time = large_m_time(config, M, N, K)
            if config.fits(M, N, K) and time < least:
                best, least = config.on(M, N, sm_count), time
    return best


def large_m_time(config: LargeMConfig, M: int, N: int, K: int) -> float:
    """Return the predicted time in microseconds."""
    step_times = _K_STEP_TIME[config.bits]
    step_time = step_times[config.num_consumers, config.block_m]
    k_steps = K / K_STEP / config.split
    tiles = config.tiles(M, N)
    if config.tail_split:
        waves, tail = divmod(tiles, config.blocks)
        half_waves = ceil_div(2 * tail, config.blocks)
        half_time = step_times[config.num_consumers, config.block_m // 2]
        products = (waves * step_time + half_waves * half_time) * k_steps
        waves += half_waves
    else:
        waves = ceil_div(tiles * config.split, config.blocks)
        products = waves * step_time * k_steps
    rows = config.num_consumers * config.block_m
    reduction = _REDUCE_SCATTER_TIME * rows if config.split > 1 else 0
    return _START_TIME + (waves - 1) * _NEXT_TILE_TIME + products + reduction


def other_time(M: int, N: int, K: int, group: int, bits: int, sm_count: int) -> float:
    """Return the predicted microseconds of triton_gemm, or of dequantizing and cuBLAS."""
    other = default_triton_config(M, N, K, group, sm_count)
    if other is None:
        return 2 * M * N * K / _CUBLAS_FLOPS + (2 + bits / 8) * N * K / _DEQUANTIZE_BYTES
    blocks = padded_n(N) // TILE_N * ceil_div(M, other.block_m) * other.split
    k_steps = K / K_STEP / other.split
    waves = ceil_div(blocks, 2 * sm_count)
    products = waves * k_steps * _TRITON_K_STEP_TIME[bits][max(64, other.block_m)]
    return _TRITON_START_TIME + products + _TRITON_SPLIT_TIME * other.split


def large_m_config_fault(
    config: LargeMConfig, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """Return why a GPU with at least `config.blocks` SMs cannot run the config; None: it can."""
    if config.bits != bits or bits not in (4, 8):
        return f"is for {config.bits} bits, of 4 and 8, found {bits}"
    if k_step(group) != K_STEP:
        return f"takes groups divisible by {K_STEP}, found {group}"
    if (config.num_consumers, config.block_m) not in LARGE_M_SIZES:
        return f"num_consumers and block_m must be of {LARGE_M_SIZES}, found {config}"
    if config.split not in LARGE_M_SPLITS or config.blocks < 1:
        return f"split must be of {LARGE_M_SPLITS} and blocks at least 1, found {config}"
    if config.tail_split and (config.block_m < 256 or config.split > 1):
        return f"tail_split is for 256 rows and split 1, found {config}"
    if config.block_m == 64 and M > 64:
        return f"block_m 64 is for at most 64 rows, found {M}"
    if config.segments > 1 and config.split > 1:
        return f"K is divided over blocks (split) or inside of them (segments), found {config}"
    if not config.fits(M, N, K):
        return (
            "each split needs a K step, a block that is resident with the others, and workspace,"
            f" found {config}"
        )
    return None
