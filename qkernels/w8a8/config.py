"""Default launch configs of the W8A8 products, int8 and float8, in Triton and for sm_90.

Legend: M rows of x, N outputs, K inputs. Times are microseconds on an H200, with bf16, weights that
are not in the L2, and calls in one CUDA graph; qkv is [6144, 4096], o [4096, 4096], gate_up [28672,
4096], down [4096, 14336]. "Rounded" times include rounding x to codes; times "of codes" do not.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8TritonConfig:
    """Launch config of triton_gemm.py. The grid is [output tiles, split]."""

    block_m: int
    block_n: int
    block_k: int = 128
    split: int = 1  # split-K
    warps: int = 4
    stages: int = 4
    weight_is_a: bool = True  # y^T = W x^T, so that few rows of x are the narrow B operand
    pdl: bool = True  # programmatic dependent launch
    group_m: int = 8  # row tiles that run at the same time, to share weight rows in the L2
    use_tma: bool = True


_BARRIER_BYTES = 256  # shared memory of the barriers


# Measured us of the choices for qkv / o / gate_up / down, including rounding x to int8. W: block_n
# 128 at gate_up. L: block_m 128, block_n 256.
# M = 1     10.3 / 9.0 / 31.9 / 20.5   split 1 / 1 / W / 4
# M = 16    10.6 / 9.3 / 33.3 / 22.5   the same
# M = 32    11.0 / 9.6 / 34.1 / 23.6   the same
# M = 64    11.4 / 10.4 / 35.7 / 26.4  split 1 / 1 / W / 2
# M = 128   14.5 / 13.9 / 40.0 / 34.3  block_m 128; 6 stages / 6 stages / L / split 4
# M = 256   19.6 / 15.1 / 63.8 / 43.7  4 stages / 6 stages / L / split 2
# M = 512   33.1 / 21.9 / 118 / 69.1   L / 128 x 128 / L / 128 x 128
# M = 1024  63.9 / 36.5 / 204 / 113    L
# M = 4096  188 / 132 / 797 / 436      L
def default_w8a8_triton_config(
    M: int, N: int, K: int, sm_count: int, integers: bool = True
) -> W8A8TritonConfig:
    """Return the config for M >= 1 rows of int8 codes, or of float8 codes."""
    if M <= 64:
        block_m = max(16, power_of_two(M))
        if ceil_div(N, 128) >= 1.5 * sm_count:
            return W8A8TritonConfig(block_m=block_m, block_n=128)
        # the 128 KB of stages at 64 rows leave room for one block per SM
        blocks_per_sm = 1 if block_m == 64 else 2
        split = _split(M, N, ceil_div(N, 64), ceil_div(K, 256), 14, blocks_per_sm * sm_count)
        return W8A8TritonConfig(block_m=block_m, block_n=64, block_k=256, split=split)
    rows = ceil_div(M, 128)
    large = rows * ceil_div(N, 256)
    if M <= 256 and large < 0.75 * sm_count:
        tiles = rows * ceil_div(N, 64)
        split = _split(M, N, tiles, ceil_div(K, 128), 28, 2 * sm_count)
        stages = 6 if split * tiles <= sm_count else 4
        return W8A8TritonConfig(block_m=128, block_n=64, split=split, stages=stages)
    pdl = M <= 256
    if not integers:  # float8 accumulators take twice the registers
        return W8A8TritonConfig(block_m=128, block_n=128, warps=8, weight_is_a=False, pdl=pdl)
    if 2 * large <= sm_count:
        return W8A8TritonConfig(block_m=128, block_n=128, weight_is_a=False, pdl=pdl)
    return W8A8TritonConfig(block_m=128, block_n=256, warps=8, weight_is_a=False, pdl=pdl)


def fitted(config: W8A8TritonConfig, shared_bytes: int) -> W8A8TritonConfig:
    """Return the config with at most as many stages as fit into shared memory, at least one.

    A block has 227 KB on an H200, and 99 KB on desktop GPUs with TMA (sm_120).
    """
    stage = (config.block_m + config.block_n) * config.block_k
    fits = (shared_bytes - _BARRIER_BYTES) // stage
    return replace(config, stages=max(1, min(config.stages, fits)))


def without_tma(config: W8A8TritonConfig) -> W8A8TritonConfig:
    """Return the config for a GPU without TMA.

    Without TMA, Triton turns a descriptor into loads that it does not pipeline. Such a GPU also has
    no wgmma: both operands go through registers, and 4 warps spill a few at 128 rows.
    """
    warps = max(8, config.warps) if config.block_m >= 128 else config.warps
    return replace(config, use_tma=False, warps=warps)


def _split(M: int, N: int, tiles: int, steps: int, min_steps: int, max_blocks: int) -> int:
    """Return the largest split-K with `min_steps` per split whose blocks are all resident."""
    fits = (
        split
        for split in (4, 3, 2)
        if steps // split >= min_steps
        and split * tiles <= max_blocks
        and split * M * N <= WORKSPACE_FLOATS
        and tiles <= WORKSPACE_COUNTERS
    )
    return next(fits, 1)


SM90_BLOCK_K = 128  # bytes of a row in a stage: the widest swizzle of shared memory
WEIGHT_BOX_ROWS = 64  # weight rows that are contiguous within a K step: 8 KB
SM90_IDLE_ROWS = (0, 16, 32)
SM90_SPLITS = (1, 2, 4)
SM90_MAX_GROUP_A = 64
_SM90_MIN_STAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8Sm90Config(CompileTimeConfig):
    """Launch config of sm90.py: all blocks are resident, and each computes several output tiles.

    A and B are the operands of wgmma.
    """

    num_consumers: int  # consumer warpgroups, each with its own rows of A
    block_b: int
    consumer_rows: int = 64  # rows of A per consumer
    idle_rows: int = 0  # rows of A per consumer without a weight row: smaller tiles, for more SMs
    split: int = 1  # split-K
    # reduce splits by reduce-scatter; False: in the last block to arrive
    reduce_scatter: bool = False
    weight_is_a: bool = True  # A is the weight and B is x; False: A is x
    group_a: int = 8  # A tiles that run at the same time, to share rows of B in the L2
    promotion_steps: int = 0  # K steps between promotions of a float8 sum; 0: integers
    store_stages: int = 2  # store tiles in flight per consumer
    max_stages: int = 24
    blocks_per_sm: int = 1
    # Weight stages that are loaded before griddepcontrol.wait. With too many, loads of x wait in
    # the SM's queue. Rounded us with 2 / 4 / 8 / all stages: qkv at 16 rows (22 stages)
    # 9.7 / 9.5 / 9.2 / 9.6, down at 64 rows (13 stages) 19.8 / 19.8 / 19.6 / 20.1.
    max_prefetch_stages: int = 8

    @property
    def block_a(self) -> int:
        """Rows of A in a stage."""
        return self.num_consumers * self.consumer_rows

    @property
    def stored_rows(self) -> int:
        """Outputs (or rows of x) that a consumer stores."""
        return self.consumer_rows - self.idle_rows

    @property
    def weight_box_rows(self) -> int:
        """Weight rows of one TMA load, chosen so that no load crosses a box."""
        return min(WEIGHT_BOX_ROWS, self.stored_rows & -self.stored_rows)

    @property
    def stored_columns(self) -> int:
        """Columns of a tile that a block stores."""
        return self.block_b // self.split if self.reduce_scatter else self.block_b

    @property
    def store_width(self) -> int:
        """Columns per store tile; with 64, three consumers spill registers."""
        return min(32 if self.num_consumers == 3 else 64, self.stored_columns)

    @property
    def stages(self) -> int:
        """As many as fit into shared memory with store tiles, column vectors and barriers."""
        store_tile = self.consumer_rows * self.store_width * 2
        stores = self.num_consumers * self.store_stages * store_tile
        stage = (self.block_a + self.block_b) * SM90_BLOCK_K + 16
        shared = (HOPPER_SHARED_BYTES + 1024) // self.blocks_per_sm - 1024  # CUDA reserves 1 KB
        vectors = 0
        if self.column_vectors_in_shared:
            vectors = self.num_consumers * self.num_column_vectors * self.stored_columns * 4
        return min(self.max_stages, (shared - 512 - stores - vectors) // stage)

    @property
    def prefetch_stages(self) -> int:
        return min(self.stages, self.max_prefetch_stages)

    @property
    def registers(self) -> int:
        """Registers per thread at launch; the producer's warpgroup then gives up its own."""
        if self._sum_registers < 64:
            return 96 if self.blocks_per_sm == 1 else 80
        return 168 if self._sum_registers > 64 and self.num_consumers == 2 else 128

    @property
    def _sum_registers(self) -> int:
        return self.consumer_rows * self.block_b // 128 * (2 if self.promotion_steps else 1)

    @property
    def column_vectors_in_shared(self) -> bool:
        """True if scales and biases of columns wait in shared memory until the product ends.

        A thread uses 16 to 64 scales, and as many biases. If it has more than 64 sums, registers
        for these are missing; then it loads one or two of them before the product into shared
        memory.
        """
        # us of codes at 1024 rows of qkv / gate_up: 34.6 / 159, or 36.3 / 164 if loaded when used
        return self._sum_registers > 64

    @property
    def num_column_vectors(self) -> int:
        """Vectors along columns: 1 (x's scales), or 2 (scales and biases of the weight)."""
        return 1 if self.weight_is_a else 2

    @property
    def consumer_registers(self) -> int:
        warpgroups = self.num_consumers + 1
        return (warpgroups * self.registers - 24) // self.num_consumers // 8 * 8

    @property
    def fits_sm(self) -> bool:
        """True if an SM has registers and pipeline stages for blocks_per_sm blocks."""
        threads = self.blocks_per_sm * (self.num_consumers + 1) * 128
        return threads * self.registers <= SM_REGISTERS and self.stages >= _SM90_MIN_STAGES

    @property
    def fits_thread(self) -> bool:
        """True if a consumer's thread has registers for its sums and column vectors."""
        vectors = 4 if self.column_vectors_in_shared else self.stored_columns // 4
        needs = self._sum_registers + vectors + 24
        return self._sum_registers <= 128 and needs <= self.consumer_registers

    def tiles(self, M: int, N: int) -> int:
        rows_a, rows_b = (N, M) if self.weight_is_a else (M, N)
        tiles_a = ceil_div(rows_a, self.num_consumers * self.stored_rows)
        return tiles_a * ceil_div(rows_b, self.block_b)

    def fits(self, M: int, N: int, sm_count: int) -> bool:
        """Return True if the kernel can run this split on a GPU with `sm_count` SMs.

        The workspace must hold all partial sums, and for a reduce-scatter all blocks must be
        resident.
        """
        if self.idle_rows and N % self.stored_rows:
            return False  # TMA does not write idle rows, which lie beyond a consumer's own rows
        if self.split == 1:
            return True
        max_blocks = sm_count * self.blocks_per_sm
        runs = not self.reduce_scatter or self.tiles(M, N) * self.split <= max_blocks
        return runs and self.fits_workspace(M, N)

    def fits_workspace(self, M: int, N: int) -> bool:
        """Return True if the workspace has slots for all partial sums, and enough counters."""
        slots = self.tiles(M, N) * self.split * self.block_a * self.block_b
        counters = self.tiles(M, N) * self.num_consumers
        return slots <= WORKSPACE_FLOATS and counters <= WORKSPACE_COUNTERS


# For more than 64 rows: (config, time of a tile on an SM relative to 128 x 128 in a large grid). A
# product takes the time of its waves of tiles; the fastest config is chosen. Measured us of int8
# codes for qkv / o / gate_up / down:
#                M = 128                   256                       1024
#  64 x 128      9.9 / 8.0 / 39.4 / 23.5   15.7 / 9.8 / 58.7 / 28.2
# 128 x 128     13.0 / 12.3 / 37.5 / 36.6  14.1 / 12.8 / 54.3 / 37.4 37.5 / 25.1 / 168 / 78.6
# 128 x 256                                22.9 / 22.3 / 52.3 / 69.5 45.0 / 23.8 / 164 / 73.3
# 256 x 128, A is x                                                  44.5 / 23.4 / 157 / 72.7
# 192 x 256                                                          35.4 / 33.1 / 180 / 109
# At 4096 rows the power limit dominates, and all large tiles are within 5 percent.
_SM90_LARGE_M_CONFIGS = {
    "int": (
        (W8A8Sm90Config(num_consumers=1, block_b=128), 0.7),
        (W8A8Sm90Config(num_consumers=2, block_b=128), 1.08),
        (W8A8Sm90Config(num_consumers=2, block_b=256), 2.0),
        (
            W8A8Sm90Config(
                num_consumers=2,
                consumer_rows=128,
                block_b=128,
                weight_is_a=False,
                group_a=16,
                store_stages=1,
            ),
            1.98,
        ),
        (W8A8Sm90Config(num_consumers=3, block_b=256), 3.06),
    ),
    # A float8 sum takes twice the registers: qkv / gate_up at 4096 rows take 164 / 794 us. A
    # promotion waits for its products, so two consumers alternate: qkv at 128 rows takes 11.3 us,
    # with one consumer of 128 columns 13.1 us.
    "float": (
        (W8A8Sm90Config(num_consumers=2, block_b=64, promotion_steps=1), 0.7),
        (
            W8A8Sm90Config(
                num_consumers=2, block_b=128, weight_is_a=False, group_a=16, promotion_steps=1
            ),
            1.08,
        ),
    ),
    # With the weight as A, each thread would load a scale for a quarter of x's rows in every step:
    # qkv at 128 rows takes 40.7 us.
    "blocks": (
        (W8A8Sm90Config(num_consumers=2, block_b=64, weight_is_a=False, promotion_steps=1), 0.7),
        (
            W8A8Sm90Config(
                num_consumers=2, block_b=128, weight_is_a=False, group_a=16, promotion_steps=1
            ),
            1.08,
        ),
    ),
}


def default_sm90_config(M: int, N: int, K: int, sm_count: int, kind: str = "int") -> W8A8Sm90Config:
    """Return the config for M >= 1 rows.

    `kind`: "int", "float", or "blocks" for float8 with a scale for each block.
    """
    if M <= 64:
        return _default_small_m(M, N, K, sm_count, kind)

    def time(row: tuple[W8A8Sm90Config, float]) -> float:
        config, cost = row
        return ceil_div(config.tiles(M, N), sm_count) * cost

    # gate_up at 256 rows, rounded: 54.5 in 256 x 128, 52.3 in 128 x 256
    rows = [row for row in _SM90_LARGE_M_CONFIGS[kind] if row[0].consumer_rows == 64 or M > 256]
    config, _ = min(rows, key=time)
    if kind == "int" and config.num_consumers == 1:
        smaller = _with_idle_rows(config, M, N, K, sm_count)
        if smaller != config:
            return smaller
    # Rounded us at 128 rows with split 2 and a reduce-scatter: down 23.4 (25.5 if the last block
    # reduces), o 9.6 (10.5 without split). Of codes, o is faster without split, 7.7 instead of 8.8:
    # its 64 blocks leave SMs for blocks of the next product.
    scattered = replace(config, split=2, reduce_scatter=True)
    worth = ceil_div(K, SM90_BLOCK_K) >= (56 if config.promotion_steps else 32)
    return scattered if worth and scattered.fits(M, N, sm_count) else config


def fixed_order_config(M: int, N: int, K: int, sm_count: int, kind: str) -> W8A8Sm90Config:
    """Return a batch-invariant config of float8 products, which does not split K."""
    config = default_sm90_config(M, N, K, sm_count, kind)
    return replace(config, split=1, reduce_scatter=False, promotion_steps=1)


def sm90_search_starts(M: int, integers: bool) -> list[W8A8Sm90Config]:
    """Return a config of every size that defaults are chosen from, where a search starts."""
    if M > 64:
        return [config for config, _ in _SM90_LARGE_M_CONFIGS["int" if integers else "float"]]
    one = W8A8Sm90Config(
        num_consumers=1, block_b=max(16, power_of_two(M)), promotion_steps=0 if integers else 2
    )
    two = replace(one, num_consumers=2)
    return [one, two, replace(one, blocks_per_sm=2), replace(two, blocks_per_sm=2)]


# Rounded us of int8 for qkv / o / gate_up / down, by the number of consumers:
# M = 1    two 9.6 / 8.4 / 33.5 / -                  one 10.7 / 8.1 / 34.6 / 19.4
#          two, two blocks per SM - / - / 31.8 / -   one, split 4, two blocks 10.6 / 7.7 / - / 19.6
# M = 16   two 10.0 / 8.5 / 33.3 / 20.8              one 9.7 / 9.2 / 34.8 / 20.1
#          two, two blocks per SM - / - / 32.0 / -   one, split 4, two blocks 10.3 / 7.8 / - / 20.2
# M = 32   two 10.3 / 8.7 / 32.6 / 22.4              one 9.2 / 8.3 / 34.7 / 20.5, two blocks 32.0
# M = 64   two 11.0 / 9.2 / 33.3 / 25.1              one 10.1 / 8.3 / 34.9 / 20.5, two blocks 33.6
def _default_small_m(M: int, N: int, K: int, sm_count: int, kind: str) -> W8A8Sm90Config:
    if kind == "blocks":
        if M > 16:
            # x is A, as in _SM90_LARGE_M_CONFIGS: otherwise qkv takes 15.0 us at 64 rows (int8 8.8)
            return W8A8Sm90Config(num_consumers=1, block_b=64, weight_is_a=False, promotion_steps=1)
        return W8A8Sm90Config(num_consumers=2, block_b=16, promotion_steps=1)
    config = W8A8Sm90Config(
        num_consumers=1,
        block_b=max(16, power_of_two(M)),
        # a promotion after one step would wait for its products before the next step begins
        promotion_steps=2 if kind == "float" else 0,
    )
    tiles = ceil_div(N, 64)
    if tiles > sm_count:
        if M > 32:
            return replace(config, num_consumers=2)
        return replace(config, num_consumers=2 if M <= 16 else 1, blocks_per_sm=2)
    if M <= 16 and 4 * tiles <= 2 * sm_count:
        quarters = replace(config, split=4, blocks_per_sm=2)
        has_steps = ceil_div(K, SM90_BLOCK_K) >= 4
        return quarters if has_steps and quarters.fits_workspace(M, N) else config
    if kind == "int" and M > 32:
        return _with_idle_rows(config, M, N, K, sm_count)
    return replace(config, num_consumers=2 if M <= 8 else 1)


# Rounded us (us of codes) with 64 outputs per tile / with fewer:
# qkv, 48 outputs: at 32 rows 9.1 (8.7) / 9.9 (8.7), at 64 9.8 (8.7) / 9.5 (8.4), at 128 11.1 (9.5)
# / 10.5 (9.6)
# o, 32 outputs: at 64 rows 7.9 (6.6) / 8.4 (7.1), at 128 9.7 (8.9, split with a reduce-scatter) /
# 9.3 (8.5)
# down, 32 outputs: at 64 rows 19.7 (17.7) / 20.9 (18.5)
def _with_idle_rows(
    config: W8A8Sm90Config, M: int, N: int, K: int, sm_count: int
) -> W8A8Sm90Config:
    """Return the config with smaller tiles if SMs would be idle otherwise.

    An SM waits for its loads. With few rows of x, a smaller tile loads less, which gains more than
    the next product gains from free SMs. For M between the measured ones and for K far from 4096,
    tiles stay whole.
    """
    most = 32 if 96 < M <= 128 else 16 if 56 < M <= 128 else 0
    if not 32 <= ceil_div(K, SM90_BLOCK_K) < 64:
        most = 0
    configs = [replace(config, idle_rows=idle) for idle in SM90_IDLE_ROWS if idle <= most]
    fit = [each for each in configs if each.fits(M, N, sm_count) and each.tiles(M, N) <= sm_count]
    return max(fit, key=lambda each: each.tiles(M, N), default=config)


def w8a8_triton_config_fault(
    config: W8A8TritonConfig, *, M: int, N: int, K: int, integers: bool = True
) -> str | None:
    """Return why the kernel cannot run the config; None: it can."""
    block_a, block_b = config.block_m, config.block_n
    if config.weight_is_a:
        block_a, block_b = block_b, block_a
    if config.block_k not in (64, 128, 256):
        return f"block_k must be 64, 128 or 256, found {config.block_k}"
    if not integers and config.block_k < 128:
        return f"block_k must be at least 128 for float8, found {config.block_k}"
    if config.group_m < 1:
        return f"group_m must be at least 1, found {config.group_m}"
    tiles = ceil_div(N, max(1, config.block_n)) * ceil_div(M, max(1, config.block_m))
    return (
        launch_fault(block_a, config.warps, config.stages, least=WARPGROUP_ROWS, most=256)
        or launch_fault(block_b, config.warps, config.stages, least=16, most=256)
        or split_fault(config.split, ceil_div(K, config.block_k), tiles, M * N)
    )  # fmt: skip


def w8a8_sm90_config_fault(
    config: W8A8Sm90Config, *, M: int, N: int, K: int, integers: bool = True
) -> str | None:
    """Return why the kernel cannot run the config; None: it can, if `fits` is True."""
    rows = (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS)
    if config.num_consumers not in (1, 2, 3):
        return f"num_consumers must be 1 to 3, found {config.num_consumers}"
    if config.consumer_rows not in rows:
        return f"consumer_rows must be one of {rows}, found {config.consumer_rows}"
    least = 16 if config.weight_is_a else WARPGROUP_ROWS  # weight boxes have 64 rows
    if not is_power(config.block_b, least, 256):
        return f"block_b must be a power of two from {least} to 256, found {config.block_b}"
    if config.weight_is_a and config.consumer_rows > WARPGROUP_ROWS:
        return f"consumer_rows must be 64 where the weight is A, found {config.consumer_rows}"
    if config.idle_rows not in SM90_IDLE_ROWS:
        return f"idle_rows must be one of {SM90_IDLE_ROWS}, found {config.idle_rows}"
    if config.idle_rows and N % config.stored_rows:
        return f"idle_rows must leave rows that divide {N} outputs, found {config.idle_rows}"
    if config.idle_rows and not (config.weight_is_a and config.consumer_rows == WARPGROUP_ROWS):
        return f"idle_rows must be 0 unless 64 rows of A are the weight's, found {config}"
    if config.split not in SM90_SPLITS or config.split > ceil_div(K, SM90_BLOCK_K):
        return f"split must be one of {SM90_SPLITS}, at most the steps of K, found {config.split}"
    if config.reduce_scatter and (config.split == 1 or config.stored_columns < 16):
        return f"reduce_scatter needs several splits with 16 columns each, found {config}"
    allowed = (0,) if integers else (1, 2) if M <= 64 else (1,)
    if config.promotion_steps not in allowed:
        return f"promotion_steps must be one of {allowed}, found {config.promotion_steps}"
    if config.store_stages not in (1, 2) or config.blocks_per_sm not in (1, 2):
        return f"store_stages and blocks_per_sm must be 1 or 2, found {config}"
    if config.max_prefetch_stages < 1:
        return f"max_prefetch_stages must be at least 1, found {config.max_prefetch_stages}"
    if not 1 <= config.group_a <= SM90_MAX_GROUP_A:
        return f"group_a must be 1 to {SM90_MAX_GROUP_A}, found {config.group_a}"
    if not config.fits_sm or not config.fits_thread:
        return f"an SM's registers or shared memory do not hold {config}"
    if config.split > 1 and not config.fits_workspace(M, N):
        return f"the workspace does not hold {config.split} splits of [{M}, {N}]"
    return None
