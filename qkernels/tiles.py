"""Tile choices: problem sizes in, launch numbers out. Plain Python; knows no tensor and no GPU.

Legend: M rows of x, N outputs, K inputs, D head dim. Microseconds are an H200's, bf16, group 128,
cold weights, calls inside one CUDA graph; qkv is [6144, 4096], o [4096, 4096], gate_up [28672,
4096], down [4096, 14336].
"""

from dataclasses import dataclass

# The private weight layout stores tiles of this many outputs: one warpgroup's share of a wgmma.
LINEAR_TILE_N = 64
LINEAR_MAX_BLOCK_K = 128
LINEAR_MIN_BLOCK_K = 32  # one row's 32 inputs fill a whole number of fragment words

# Above this many rows the weight is dequantized to a scratch buffer for the library's GEMM. At M =
# 256 a first form of the kernel took 43.5 / 33.6 / 159 / 104 us (qkv / o / gate_up / down), cuBLAS
# 22.1 / 18.1 / 90.1 / 48.6 plus about 15 / 10 / 70 / 35 for dequantizing (bytes at 4.2 TB/s,
# computed).
LINEAR_MAX_ROWS = 256

# Partial sums of all splits: 16 MiB of float32, allocated once for each device.
LINEAR_WORKSPACE_FLOATS = 2**22
LINEAR_COUNTERS = 4096  # output tiles that may be split


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """How one W4A16 product is cut. The grid is [ceil(N / block_n), split, ceil(M / block_m)]."""

    block_m: int
    block_n: int  # 64 or 128: one or two stored tiles
    split: int  # parts of K that different blocks sum
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearRow:
    max_m: int
    block_m: int
    max_split: int
    blocks_per_sm: int  # splitting stops before the grid exceeds this
    wide_from: float  # block_n is 128 with 8 warps from this many such blocks for each SM


# M <= 16: 9.5 / 7.7 / 27.5 / 15.8 us with block_n 64, 4 warps, 3 stages, split 8 (gate_up 2).
# M = 64: 14.2 / 11.9 / 41.4 / 26.7 us with split 4; gate_up block_n 128, 8 warps, no split.
# The rows for 32 and 256 are interpolated, not measured; block_m 128 spills registers (compiled for
# sm_90).
_LINEAR_ROWS = (
    _LinearRow(max_m=16, block_m=16, max_split=8, blocks_per_sm=7, wide_from=float("inf")),
    _LinearRow(max_m=32, block_m=32, max_split=8, blocks_per_sm=6, wide_from=float("inf")),
    _LinearRow(max_m=64, block_m=64, max_split=4, blocks_per_sm=3, wide_from=1.5),
    _LinearRow(max_m=LINEAR_MAX_ROWS, block_m=64, max_split=4, blocks_per_sm=2, wide_from=0),
)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def linear_block_k(group: int) -> int:
    """Inputs of one step: the largest power of two up to 128 that divides the group.

    A step then lies in one group, and its scale multiplies the accumulator.
    """
    return min(LINEAR_MAX_BLOCK_K, group & -group)


def linear_padded_n(N: int) -> int:
    return ceil_div(N, LINEAR_TILE_N) * LINEAR_TILE_N


def linear_tile(M: int, N: int, K: int, group: int, sm_count: int) -> LinearTile | None:
    """The tile for M >= 1 rows; None: dequantize and use the library's GEMM."""
    row = next((row for row in _LINEAR_ROWS if row.max_m >= M), None)
    if row is None:
        return None
    N = linear_padded_n(N)
    wide = N % 128 == 0 and row.wide_from * sm_count <= N // 128
    block_n = 128 if wide else LINEAR_TILE_N
    tiles = N // block_n * ceil_div(M, row.block_m)
    steps = K // linear_block_k(group)
    split = 1
    while (
        2 * split <= min(row.max_split, steps)
        and 2 * split * tiles <= row.blocks_per_sm * sm_count
        and 2 * split * M * N <= LINEAR_WORKSPACE_FLOATS
        and tiles <= LINEAR_COUNTERS
    ):
        split *= 2
    return LinearTile(
        block_m=row.block_m, block_n=block_n, split=split, warps=8 if wide else 4, stages=3
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """How paged attention is cut. A block does block_q rows of all heads that share a KV head."""

    block_m: int  # block_q times the heads of one KV head, padded to a power of two
    block_q: int
    keys: int  # keys of one step
    split: int  # parts of the context that different blocks read
    warps: int
    stages: int


ATTENTION_MAX_SPLIT = 32
# A part shorter than this reads less than it costs to start and to merge. Not measured.
ATTENTION_MIN_KEYS_OF_PART = 256


def attention_tile(
    *,
    num_requests: int,
    num_kv_heads: int,
    heads_per_kv_head: int,
    head_dim: int,
    element_size: int,
    max_query_len: int,
    max_context_len: int,
    window: int | None,
    sm_count: int,
) -> AttentionTile:
    """Tiles from host numbers alone, so that a CUDA graph captured with them stays right."""
    group = power_of_two(heads_per_kv_head)
    # 64 rows fill one warpgroup's wgmma; 16 is the least that a tensor core takes. float32 has no
    # tensor core: more than 16 rows or 16 keys spill registers (compiled for sm_90).
    most_rows = 16 if element_size == 4 else 64
    block_m = max(16, group, min(most_rows, group * power_of_two(max_query_len)))
    # K and V of all stages must leave room in 227 KB of shared memory: 96 KB at the widest
    if element_size == 4:
        keys, stages = 16, 2
    else:
        keys, stages = (64 if head_dim <= 128 else 32), 3
    split = 1
    if group * max_query_len <= 32:
        programs = max(1, num_requests * num_kv_heads)
        visible = min(max_context_len, window or max_context_len)
        # split by work: two blocks for each SM, as long as each part is worth a block
        while (
            2 * split <= ATTENTION_MAX_SPLIT
            and split * programs < 2 * sm_count
            and 2 * split * ATTENTION_MIN_KEYS_OF_PART <= visible
        ):
            split *= 2
    return AttentionTile(
        block_m=block_m, block_q=block_m // group, keys=keys, split=split, warps=4, stages=stages
    )
