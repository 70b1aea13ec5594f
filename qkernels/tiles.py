"""Tile choices of W4A16 and W8A16: problem sizes in, launch numbers out. Plain Python, no tensors.

Legend: M rows of x, N outputs, K inputs. Microseconds are an H200's, bf16, group 128,
cold weights, calls inside one CUDA graph; qkv is [6144, 4096], o [4096, 4096], gate_up [28672,
4096], down [4096, 14336].
"""

import functools
from dataclasses import dataclass

# The private weight layout stores tiles of this many outputs: one warpgroup's share of a wgmma.
LINEAR_TILE_N = 64
LINEAR_MAX_BLOCK_K = 128
LINEAR_MIN_BLOCK_K = 32  # one row's 32 inputs fill a whole number of fragment words

# Above this many rows the weight is dequantized to a scratch buffer for the library's GEMM. At 1024
# rows of qkv / o / gate_up / down the kernel takes 78 / 52 / 407 / 190 us, the scratch buffer 82 /
# 58 / 421 / 204; at 2048 the kernel takes twice as long, dequantizing the same 18 / 11 / 80 / 40.
LINEAR_MAX_ROWS = 1024

# Partial sums of all splits: 16 MiB of float32, allocated once for each device.
LINEAR_WORKSPACE_FLOATS = 2**22
LINEAR_COUNTERS = 4096  # output tiles that may be split

HOPPER_SHARED_BYTES = 227 * 1024  # of a block on sm_90


class CompiledIn:
    """A tile that is a kernel's constant, with what is computed of it.

    Triton's cache on disk knows a constant by its `cache_key`, or by its text, which for a
    dataclass is its fields: what another version computes otherwise would not be told apart.
    """

    __slots__ = ()

    @property
    def cache_key(self) -> str:
        of_type = type(self)
        names = [name for name in dir(of_type) if isinstance(getattr(of_type, name), property)]
        return f"{self} {[(name, getattr(self, name)) for name in names if name != 'cache_key']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """How one W4A16 product is cut. The grid is [ceil(N / block_n), split, ceil(M / block_m)]."""

    block_m: int
    block_n: int  # 64 or 128: one or two stored tiles
    split: int  # parts of K that different blocks sum
    warps: int = 4
    stages: int = 3
    bulk: bool = False  # x through the bulk copy engine
    early: bool = False  # start while the kernel before it ends


LINEAR_DIGITS_MAX_ROWS = 4
LINEAR_DIGITS = 4  # of one input, 8 bits each
LINEAR_DIGITS_COLUMNS = 8  # of one product of the tensor core: a row takes LINEAR_DIGITS of them


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDigitsTile:
    """How one product of few rows is cut for the integer tensor core (w4a16_digits.py)."""

    block_n: int = 16  # 16, 32 or 64
    warps: int = 8  # of a block, each with its own steps
    ahead: int = 2  # steps that a warp asks for at once


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearRow:
    max_m: int
    block_m: int
    max_split: int
    blocks_per_sm: int  # splitting stops before the grid exceeds this
    bulk: bool = False
    early: bool = False
    max_tiles_per_sm: float = float("inf")  # the row is for at most this many tiles of 64 outputs
    max_steps: float = float("inf")  # and for at most this many steps
    wide_from: float = float("inf")  # block_n is 128 from this many such tiles for each SM


# Splits are tried largest first. 12 parts cost registers where the last block adds them: down takes
# 13.6 us at one row in 10 parts, 17.0 in 12.
_SPLITS = (10, 8, 6, 4, 3, 2)

# Measured choices, us for qkv / o / gate_up / down; README.md says what else was tried:
# M = 1     7.4 / 6.3 / 23.3 / 13.6   split 8 / 10 / 2 / 10; 7 blocks fill an SM's registers
# M = 16    8.2 / 7.0 / 23.5 / 13.9   the same
# M = 32    10.7 / 8.4 / 29.9 / 16.4  split 4 / 8 / 1 / 8
# M = 64    12.4 / 11.3 / 34.1 / 22.5 split 4 / 6 / 1 / 6, gate_up block_n 128
# M = 128   18.1 / 14.6 / 53.1 / 32.7 block_m 64, split 2 / 3; block_m 128, split 1 / 4
# M = 256   26.1 / 20.7 / 110 / 51.6  block_m 128, split 1 / 2 / 1 / 2
# M = 1024  77.9 / 52.0 / 407 / 190
_LINEAR_ROWS = (
    _LinearRow(max_m=16, block_m=16, max_split=10, blocks_per_sm=7, early=True),
    _LinearRow(max_m=32, block_m=32, max_split=8, blocks_per_sm=4, bulk=True, early=True),
    _LinearRow(
        max_m=64, block_m=64, max_split=6, blocks_per_sm=3, bulk=True, early=True, wide_from=1.5
    ),
    _LinearRow(
        max_m=128,
        block_m=64,
        max_split=3,
        blocks_per_sm=3,
        bulk=True,
        early=True,
        max_tiles_per_sm=1,
        max_steps=64,
    ),
    _LinearRow(max_m=128, block_m=128, max_split=4, blocks_per_sm=2, bulk=True, early=True),
    _LinearRow(max_m=LINEAR_MAX_ROWS, block_m=128, max_split=2, blocks_per_sm=2, bulk=True),
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


@functools.lru_cache(maxsize=4096)
def linear_tile(M: int, N: int, K: int, group: int, sm_count: int) -> LinearTile | None:
    """The tile for M >= 1 rows; None: dequantize and use the library's GEMM."""
    N = linear_padded_n(N)
    tiles_per_sm = N // LINEAR_TILE_N / sm_count
    steps = K // linear_block_k(group)

    def is_for(row: _LinearRow) -> bool:
        return row.max_m >= M and tiles_per_sm <= row.max_tiles_per_sm and steps <= row.max_steps

    row = next(filter(is_for, _LINEAR_ROWS), None)
    if row is None:
        return None
    wide = N % 128 == 0 and row.wide_from <= tiles_per_sm / 2
    block_n = 128 if wide else LINEAR_TILE_N
    tiles = N // block_n * ceil_div(M, row.block_m)

    def can_split(split: int) -> bool:
        return (
            split <= min(row.max_split, steps)
            and split * tiles <= row.blocks_per_sm * sm_count
            and split * M * N <= LINEAR_WORKSPACE_FLOATS
            and tiles <= LINEAR_COUNTERS
        )

    return LinearTile(
        block_m=row.block_m,
        block_n=block_n,
        split=next(filter(can_split, _SPLITS), 1),
        bulk=row.bulk,
        early=row.early,
    )


def linear_digits_fit(M: int, K: int) -> bool:
    """Whether the digits of M rows, their scales and sums fit into the workspace."""
    columns = ceil_div(M * LINEAR_DIGITS, LINEAR_DIGITS_COLUMNS) * LINEAR_DIGITS_COLUMNS
    return K // LINEAR_MAX_BLOCK_K * columns * (LINEAR_MAX_BLOCK_K // 4 + 2) <= (
        LINEAR_WORKSPACE_FLOATS
    )


def linear_digits_pay(M: int, N: int, K: int) -> bool:
    """Whether 4 bits gain by digits that have to be made first, by a kernel of their own.

    Measured, us for qkv / o / gate_up / down, in brackets the ring, which takes x as it is:
    M = 1  5.8 (6.4) / 4.8 (5.1) / 18.1 (18.4) / 11.0 to 11.8 (10.5), 128256 x 4096 65 (78)
    M = 4  7.0 (6.3) / 5.1 (5.2) / 18.9 (18.5) / 12.3 (10.5)
    """
    return N * K > 2**27 or (M <= 2 and K // LINEAR_MAX_BLOCK_K <= 64)


# Measured, us for qkv / o / gate_up / down, in brackets the portable body:
# M = 1         6.1 (7.7) / 5.0 (6.6) / 19.1 (23.9) / 11.3 (13.4)
# M = 2         6.3 (7.7) / 5.1 (6.6) / 18.9 (23.5) / 11.7 (13.5)
# M = 4         7.3 (7.9) / 5.4 (6.7) / 19.8 (23.5) / 12.5 (13.5)
# M = 8         10.3 (7.8) / 8.2 (6.6) / 32.5 (23.5) / 19.5 (13.7)
# M = 1, 8 bits 9.3 (10.7) / 7.4 (9.3) / 34.9 (41.0) / 18.7 (21.7)
# M = 4, 8 bits 10.9 (10.5) / 8.7 (9.5) / 36.3 (41.5) / 21.0 (21.4)
@functools.lru_cache(maxsize=4096)
def linear_digits_tile(
    M: int, N: int, K: int, group: int, bits: int, sm_count: int
) -> LinearDigitsTile | None:
    """The tile for few rows; None: there are more, or a step lies in several groups."""
    if M > LINEAR_DIGITS_MAX_ROWS or linear_block_k(group) != LINEAR_MAX_BLOCK_K:
        return None
    if not linear_digits_fit(M, K):
        return None
    steps = K // LINEAR_MAX_BLOCK_K
    # a block reads all digits: where there are many blocks, fewer and larger ones
    wide = M > LINEAR_DIGITS_COLUMNS // LINEAR_DIGITS and 2.5 * sm_count < N / 16
    if bits == 8:  # a step is twice as many bytes
        warps, ahead = 16 if steps > 64 else 8, 1
    else:
        warps = 4 if wide else 8
        ahead = min(2, ceil_div(steps, warps))
    return LinearDigitsTile(block_n=32 if wide else 16, warps=warps, ahead=ahead)
