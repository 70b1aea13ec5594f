"""Tile choices: problem sizes in, launch numbers out. Plain Python; knows no tensor and no GPU.

Legend: M rows of x, N outputs, K inputs, D head dim. Microseconds are an H200's, bf16, group 128,
cold weights, calls inside one CUDA graph; qkv is [6144, 4096], o [4096, 4096], gate_up [28672,
4096], down [4096, 14336].
"""

import functools
from dataclasses import dataclass, replace

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


LINEAR_HOPPER_BLOCK_M, LINEAR_HOPPER_BLOCK_N = 256, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHopperTile:
    """How one W4A16 product is cut for the Hopper body. Each block makes several whole tiles."""

    blocks: int  # of the grid: at most one for each SM
    block_m: int = LINEAR_HOPPER_BLOCK_M
    block_n: int = LINEAR_HOPPER_BLOCK_N
    stages: int = 4  # slices of 64 inputs of x


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


# us of one wave of blocks and 128 inputs: the Hopper body (128 x 256, one block on an SM) took 43
# to 50 for a wave of 4096 inputs, the portable one (64 x 128, two blocks on an SM) 26 to 29.
_LINEAR_HOPPER_STEP = 1.4
_PORTABLE_STEP = 0.83
_LIBRARY_RATE = 770  # operations of a us, in millions; dequantizing comes before it
_DEQUANTIZE_RATE = 3.7  # bytes of a us, in millions


# Measured, us for qkv / o / gate_up / down, in brackets the portable body or the library:
# M = 256   42 (27) / 42 (21) / 91 (115) / 151 (53)
# M = 512   43 (53) / 43 (27) / 174 (207) / 138 (93)
# M = 1024  91 (80) / 47 (53) / 349 (419) / 159 (187)
# M = 4096  265 (311) / 177 (203) / 1391 (1501) / 645 (693)
@functools.lru_cache(maxsize=4096)
def linear_hopper_tile(
    M: int, N: int, K: int, group: int, sm_count: int
) -> LinearHopperTile | None:
    """The tile of the Hopper body for M rows; None: another way is faster, or it cannot."""
    if linear_block_k(group) != LINEAR_MAX_BLOCK_K:
        return None
    steps = K / LINEAR_MAX_BLOCK_K
    tiles = ceil_div(N, LINEAR_HOPPER_BLOCK_N) * ceil_div(M, LINEAR_HOPPER_BLOCK_M)
    hopper = ceil_div(tiles, sm_count) * steps * _LINEAR_HOPPER_STEP
    portable = linear_tile(M, N, K, group, sm_count)
    if portable is None:
        other = 2e-6 * M * N * K / _LIBRARY_RATE + 2.5e-6 * N * K / _DEQUANTIZE_RATE
    else:
        blocks = linear_padded_n(N) // portable.block_n * ceil_div(M, portable.block_m)
        waves = ceil_div(blocks * portable.split, 2 * sm_count)
        other = waves * steps / portable.split * _PORTABLE_STEP
    return LinearHopperTile(blocks=min(tiles, sm_count)) if hopper < other else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Tile:
    """How one W8A8 product is cut. The grid is [all output tiles, split]."""

    block_m: int
    block_n: int
    block_k: int = 128
    split: int = 1  # parts of K that different blocks sum
    warps: int = 4
    stages: int = 4
    weight_left: bool = True  # y^T = W x^T: few rows then fill the narrow side of the tensor core
    early: bool = True  # start while the kernel before it ends
    tiles_m_of_group: int = 8  # row tiles that run beside each other


INT8_BARRIER_BYTES = 256  # of shared memory, beside the stages


# Measured choices, us for qkv / o / gate_up / down, rounding x to int8 included. W: block_n 128 at
# gate_up, L: block_m 128, block_n 256.
# M = 1     10.3 / 9.0 / 31.9 / 20.5   split 1 / 1 / W / 4
# M = 16    10.6 / 9.3 / 33.3 / 22.5   the same
# M = 32    11.0 / 9.6 / 34.1 / 23.6   the same
# M = 64    11.4 / 10.4 / 35.7 / 26.4  split 1 / 1 / W / 2
# M = 128   14.5 / 13.9 / 40.0 / 34.3  block_m 128; 6 stages / 6 stages / L / split 4
# M = 256   19.6 / 15.1 / 63.8 / 43.7  4 stages / 6 stages / L / split 2
# M = 512   33.1 / 21.9 / 118 / 69.1   L / 128 x 128 / L / 128 x 128
# M = 1024  63.9 / 36.5 / 204 / 113    L
# M = 4096  188 / 132 / 797 / 436      L
def int8_tile(M: int, N: int, K: int, sm_count: int, integers: bool = True) -> Int8Tile:
    """The tile for M >= 1 rows of int8 codes, or of float8 ones."""
    if M <= 64:
        block_m = max(16, power_of_two(M))
        if ceil_div(N, 128) >= 1.5 * sm_count:
            return Int8Tile(block_m=block_m, block_n=128)
        # 128 KB of stages at 64 rows leave room for one block on an SM
        blocks_per_sm = 1 if block_m == 64 else 2
        split = _int8_split(M, N, ceil_div(N, 64), ceil_div(K, 256), 14, blocks_per_sm * sm_count)
        return Int8Tile(block_m=block_m, block_n=64, block_k=256, split=split)
    rows = ceil_div(M, 128)
    large = rows * ceil_div(N, 256)
    if M <= 256 and large < 0.75 * sm_count:
        tiles = rows * ceil_div(N, 64)
        split = _int8_split(M, N, tiles, ceil_div(K, 128), 28, 2 * sm_count)
        stages = 6 if split * tiles <= sm_count else 4
        return Int8Tile(block_m=128, block_n=64, split=split, stages=stages)
    early = M <= 256
    if not integers:  # sums of float8 take twice the registers
        return Int8Tile(block_m=128, block_n=128, warps=8, weight_left=False, early=early)
    if 2 * large <= sm_count:
        return Int8Tile(block_m=128, block_n=128, weight_left=False, early=early)
    return Int8Tile(block_m=128, block_n=256, warps=8, weight_left=False, early=early)


def fitted(tile: Int8Tile, shared_bytes: int) -> Int8Tile:
    """The tile with as many stages as fit into a block's shared memory; one stage always stays.

    An H200 has 227 KB; GPUs for desktops that copy in bulk (sm_120) have 99.
    """
    stage = (tile.block_m + tile.block_n) * tile.block_k
    fits = (shared_bytes - INT8_BARRIER_BYTES) // stage
    return replace(tile, stages=max(1, min(tile.stages, fits)))


def _int8_split(M: int, N: int, tiles: int, steps: int, steps_of_part: int, max_blocks: int) -> int:
    """Parts of K: as many as leave each part enough steps, and as many blocks as run at once."""
    fits = (
        split
        for split in (4, 3, 2)
        if steps // split >= steps_of_part
        and split * tiles <= max_blocks
        and split * M * N <= LINEAR_WORKSPACE_FLOATS
        and tiles <= LINEAR_COUNTERS
    )
    return next(fits, 1)


INT8_HOPPER_BLOCK_K = 128  # bytes of a row in one stage: the widest swizzle of shared memory
_INT8_HOPPER_SHARED = 227 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8HopperTile:
    """How w8a8_hopper.py cuts one product. The grid is as many blocks as run at once."""

    parts: int  # warpgroups that multiply, each its own rows of the left operand
    block_right: int
    part: int = 64  # rows of the left operand for each warpgroup
    split: int = 1  # parts of K that different blocks sum
    weight_left: bool = True  # the weight's rows are the left operand's
    left_of_group: int = 8  # left tiles that run beside each other
    steps_of_sum: int = 0  # steps between two emptyings of a float8 sum; 0: integers
    stores: int = 2  # pieces of the result on their way out, of each warpgroup
    max_stages: int = 24
    blocks_per_sm: int = 1

    @property
    def block_left(self) -> int:
        return self.parts * self.part

    @property
    def store_width(self) -> int:
        """Columns of a piece of the result; with 64 three warpgroups spill registers."""
        return min(32 if self.parts == 3 else 64, self.block_right)

    @property
    def stages(self) -> int:
        """As many as shared memory holds beside the pieces of the result and the barriers."""
        stores = self.parts * self.stores * self.part * self.store_width * 2
        stage = (self.block_left + self.block_right) * INT8_HOPPER_BLOCK_K + 16
        shared = (_INT8_HOPPER_SHARED + 1024) // self.blocks_per_sm - 1024  # 1 KB is the system's
        return min(self.max_stages, (shared - 512 - stores) // stage)

    @property
    def registers(self) -> int:
        """Of each thread at launch; then the copying warpgroup gives its own to the others."""
        sums = self.part * self.block_right // 128 * (2 if self.steps_of_sum else 1)
        if sums < 64:
            return 96 if self.blocks_per_sm == 1 else 80
        return 168 if sums > 64 and self.parts == 2 else 128

    @property
    def consumer_registers(self) -> int:
        return ((self.parts + 1) * self.registers - 24) // self.parts // 8 * 8

    def tiles(self, M: int, N: int) -> int:
        left, right = (N, M) if self.weight_left else (M, N)
        return ceil_div(left, self.block_left) * ceil_div(right, self.block_right)

    def fits_workspace(self, M: int, N: int) -> bool:
        """Whether the partial sums of all parts have a slot, and their warpgroups a counter."""
        slots = self.tiles(M, N) * self.split * self.block_left * self.block_right
        counters = self.tiles(M, N) * self.parts
        return slots <= LINEAR_WORKSPACE_FLOATS and counters <= LINEAR_COUNTERS


# Above 64 rows: (tile, time of one tile on an SM, in tiles of 128 x 128 inside a large grid). A
# product takes its waves of tiles, and the best is taken. us on int8 codes of qkv / o / gate_up /
# down:
#                M = 128                   256                       1024
#  64 x 128      9.9 / 8.0 / 39.4 / 23.5   15.7 / 9.8 / 58.7 / 28.2
# 128 x 128     13.0 / 12.3 / 37.5 / 36.6  14.1 / 12.8 / 54.3 / 37.4 37.5 / 25.1 / 168 / 78.6
# 128 x 256                                22.9 / 22.3 / 52.3 / 69.5 45.0 / 23.8 / 164 / 73.3
# 256 x 128, x left                                                  44.5 / 23.4 / 157 / 72.7
# 192 x 256                                                          35.4 / 33.1 / 180 / 109
# At 4096 rows the power limit decides, and all large tiles are within 5 percent.
_INT8_HOPPER_TILES = {
    "int": (
        (Int8HopperTile(parts=1, block_right=128), 0.7),
        (Int8HopperTile(parts=2, block_right=128), 1.08),
        (Int8HopperTile(parts=2, block_right=256), 2.0),
        (
            Int8HopperTile(
                parts=2,
                part=128,
                block_right=128,
                weight_left=False,
                left_of_group=16,
                stores=1,
            ),
            1.98,
        ),
        (Int8HopperTile(parts=3, block_right=256), 3.06),
    ),
    # a float8 sum takes twice the registers: qkv / gate_up at 4096 rows 164 / 794. A step's sum is
    # waited for, so two warpgroups take turns: qkv at 128 rows 11.3, with one of 128 columns 13.1
    "float": (
        (Int8HopperTile(parts=2, block_right=64, steps_of_sum=1), 0.7),
        (
            Int8HopperTile(
                parts=2, block_right=128, weight_left=False, left_of_group=16, steps_of_sum=1
            ),
            1.08,
        ),
    ),
    # with the weight left, each thread would load a scale for a quarter of x's rows in every step:
    # qkv at 128 rows 40.7
    "blocks": (
        (Int8HopperTile(parts=2, block_right=64, weight_left=False, steps_of_sum=1), 0.7),
        (
            Int8HopperTile(
                parts=2, block_right=128, weight_left=False, left_of_group=16, steps_of_sum=1
            ),
            1.08,
        ),
    ),
}


# three warpgroups have no registers left for zero points
_INT8_HOPPER_TILES["asymmetric"] = _INT8_HOPPER_TILES["int"][:-1]


def int8_hopper_tile(M: int, N: int, K: int, sm_count: int, kind: str = "int") -> Int8HopperTile:
    """The tile for M >= 1 rows.

    `kind`: "int", "asymmetric" where x has zero points, "float", or "blocks" of float8 with scales
    of their own.
    """
    if M <= 64:
        return _int8_hopper_tile_of_few_rows(M, N, sm_count, kind)

    def time(row: tuple[Int8HopperTile, float]) -> float:
        tile, cost = row
        return ceil_div(tile.tiles(M, N), sm_count) * cost

    # gate_up at 256 rows, rounding included: 54.5 in 256 x 128, 52.3 in 128 x 256
    rows = [row for row in _INT8_HOPPER_TILES[kind] if row[0].part == 64 or M > 256]
    tile, _ = min(rows, key=time)
    # down at 128 rows: 22.6 us in 2 parts, 23.5 in one; o, of fewer steps, 10.0 and 8.0
    halves = replace(tile, split=2)
    worth = ceil_div(K, INT8_HOPPER_BLOCK_K) >= 56 and 2 * tile.tiles(M, N) <= sm_count
    return halves if worth and halves.fits_workspace(M, N) else tile


# us, rounding x to int8 included, of qkv / o / gate_up / down:
# M = 1    two warpgroups 9.6 / 8.4 / 33.5 / -     one 10.7 / 8.1 / 34.6 / 19.4
#          two, two blocks an SM - / - / 31.8 / -  one, 4 parts, two blocks 10.6 / 7.7 / - / 19.6
# M = 16   two 10.0 / 8.5 / 33.3 / 20.8            one 9.7 / 9.2 / 34.8 / 20.1
#          two, two blocks an SM - / - / 32.0 / -  one, 4 parts, two blocks 10.3 / 7.8 / - / 20.2
# M = 32   two 10.3 / 8.7 / 32.6 / 22.4            one 9.2 / 8.3 / 34.7 / 20.5, two blocks 32.0
# M = 64   two 11.0 / 9.2 / 33.3 / 25.1            one 10.1 / 8.3 / 34.9 / 20.5, two blocks 33.6
def _int8_hopper_tile_of_few_rows(M: int, N: int, sm_count: int, kind: str) -> Int8HopperTile:
    if kind == "blocks":
        if (
            M > 16
        ):  # see _INT8_HOPPER_TILES: with the weight left qkv takes 15.0 us at 64 rows, int8 8.8
            return Int8HopperTile(parts=1, block_right=64, weight_left=False, steps_of_sum=1)
        return Int8HopperTile(parts=2, block_right=16, steps_of_sum=1)
    tile = Int8HopperTile(
        parts=1,
        block_right=max(16, power_of_two(M)),
        # one step of float8 would be waited for before the next begins
        steps_of_sum=2 if kind == "float" else 0,
    )
    tiles = ceil_div(N, 64)
    if tiles > sm_count:
        if M > 32:
            return replace(tile, parts=2)
        return replace(tile, parts=2 if M <= 16 else 1, blocks_per_sm=2)
    if M <= 16 and 4 * tiles <= 2 * sm_count:
        quarters = replace(tile, split=4, blocks_per_sm=2)
        return quarters if quarters.fits_workspace(M, N) else tile
    return replace(tile, parts=2 if M <= 8 else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """How paged attention is cut. A block does block_q rows of all heads that share a KV head."""

    block_m: int  # block_q times the heads of one KV head, padded to a power of two
    block_q: int
    keys: int  # keys of one step
    split: int  # parts of the context that different blocks read
    warps: int
    stages: int
    gluon: bool = False  # coded_decode.py does it; it has its own keys and warps


# Up to so many rows of a KV head a request decodes: its keys are what takes time, not its products.
ATTENTION_FEW_ROWS = 32
ATTENTION_MAX_SPLIT = 32
GLUON_ROWS = 8  # of a block of coded_decode.py: the narrow side of the tensor core's product
# A part shorter than this reads less than it costs to start and to merge: 1 request of 2048 keys
# takes 10.8 us in 16 parts, 13.4 us in 8.
ATTENTION_MIN_KEYS_OF_PART = 128


def attention_tile(
    *,
    num_requests: int,
    num_kv_heads: int,
    heads_per_kv_head: int,
    head_dim: int,
    element_size: int,
    page_element_size: int | None = None,  # default: element_size
    max_query_len: int,
    max_context_len: int,
    window: int | None,
    sm_count: int,
    gluon: bool = False,  # whether coded_decode.py could
) -> AttentionTile:
    """Tiles from host numbers alone, so that a CUDA graph captured with them stays right."""
    group = power_of_two(heads_per_kv_head)
    few_rows = group * max_query_len <= ATTENTION_FEW_ROWS
    programs = max(1, num_requests * num_kv_heads)
    split = 1
    if few_rows:
        visible = min(max_context_len, window or max_context_len)
        # split by work: up to two blocks for each SM, as long as each part is worth a block
        while (
            2 * split <= ATTENTION_MAX_SPLIT
            and 2 * split * programs <= 2 * sm_count
            and 2 * split * ATTENTION_MIN_KEYS_OF_PART <= visible
        ):
            split *= 2
    # 16 rows is the least that a tensor core takes; 64 fill one warpgroup's wgmma. float32 has no
    # tensor core: more than 16 rows or 16 keys spill registers (compiled for sm_90).
    most_rows = 16 if element_size == 4 else 64
    block_m = max(16, group, min(most_rows, group * power_of_two(max_query_len)))
    # K and V of all stages must leave room in 227 KB of shared memory: 192 KB at the widest.
    if element_size == 4:
        keys, stages = 16, 2
    elif head_dim > 128:
        # 32 keys of a chunk spill where codes become numbers
        keys, stages = (16 if page_element_size == 1 and block_m == 64 else 32), 3
    elif few_rows and split * programs <= 4 * sm_count:
        # 8 x 4096 keys: 41.7 us, with 64 keys 54; 32 x 4096: 130.6, with 64 keys or 3 stages 140
        keys, stages = 128, (3 if split > 1 else 2)
    elif few_rows:
        keys, stages = 64, 2  # 128 x 4096: 494 us, with 128 keys 504
    else:
        keys, stages = 64, 3
    gluon = gluon and group <= GLUON_ROWS and group * max_query_len <= 2 * GLUON_ROWS
    if gluon:
        block_m = GLUON_ROWS
    return AttentionTile(
        block_m=block_m,
        block_q=block_m // group,
        keys=keys,
        split=split,
        warps=4,
        stages=stages,
        gluon=gluon,
    )


CHUNK_ROWS = 128  # query rows of a tile of attention_hopper.py: tokens times heads of a KV head
CHUNK_KEYS = 128  # of one step: 64 take a sixth longer, and 256 have no room in registers
CHUNK_STAGES = (
    2  # steps whose keys and values have room in shared memory, beside two tiles' queries
)
CHUNK_MAX_SPLIT = 32
# 128 rows on 32768 keys, 32 tiles: 483 us in 1 part, 249 in 2, 154 in 4, 144 in 8, which are more
# tiles than SMs. The least worth while was not measured.
CHUNK_MIN_KEYS_OF_PART = 1024


def chunk_split(tiles: int, visible: int, sm_count: int) -> int:
    """Parts of the context of a chunk, where its tiles leave SMs idle; `visible` keys of a row."""
    split = 1
    while (
        2 * split <= CHUNK_MAX_SPLIT
        and 2 * split * tiles <= sm_count
        and 2 * split * CHUNK_MIN_KEYS_OF_PART <= visible
    ):
        split *= 2
    return split
