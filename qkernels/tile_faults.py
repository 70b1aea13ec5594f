"""Why a tile cannot do a problem: what a kernel takes on trust, said once. Plain Python.

Tiles come from tiles.py, which a test holds to these, or from a file, which is checked as it is
read: a split that overran the workspace would write over other memory.
"""

from qkernels.attention_tiles import ATTENTION_MAX_SPLIT, AttentionTile
from qkernels.int8_tiles import (
    INT8_HOPPER_BLOCK_K,
    INT8_HOPPER_IDLE_ROWS,
    INT8_HOPPER_MAX_GROUP,
    INT8_HOPPER_SPLITS,
    Int8HopperTile,
    Int8Tile,
)
from qkernels.tiles import (
    LINEAR_COUNTERS,
    LINEAR_DIGITS_MAX_ROWS,
    LINEAR_MAX_BLOCK_K,
    LINEAR_TILE_N,
    LINEAR_WORKSPACE_FLOATS,
    LinearDigitsTile,
    LinearTile,
    ceil_div,
    linear_block_k,
    linear_digits_fit,
    linear_padded_n,
    power_of_two,
)
from qkernels.w4a16_hopper_tiles import (
    LINEAR_HOPPER_SIZES,
    LINEAR_HOPPER_SPLITS,
    LinearHopperTile,
)
from qkernels.w4a16_ring_tiles import LINEAR_RING_ROWS, LinearRingTile

MAX_STAGES = 8
WARPGROUP_ROWS = 64  # of the left operand of one product


def linear_tile_fault(
    tile: LinearTile, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """None: the kernel can run it."""
    padded_n = linear_padded_n(N)
    if tile.block_n not in (LINEAR_TILE_N, 2 * LINEAR_TILE_N) or padded_n % tile.block_n:
        return f"block_n must be 64 or 128 and divide {padded_n}, found {tile.block_n}"
    tiles = padded_n // tile.block_n * ceil_div(M, max(1, tile.block_m))
    return (
        _launch_fault(tile.block_m, tile.warps, tile.stages, least=16, most=256)
        or _split_fault(tile.split, K // linear_block_k(group), tiles, M * N)
    )  # fmt: skip


def linear_digits_tile_fault(
    tile: LinearDigitsTile, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """None: the kernel can run it."""
    if M > LINEAR_DIGITS_MAX_ROWS or bits not in (4, 8):
        return f"takes at most {LINEAR_DIGITS_MAX_ROWS} rows and 4 or 8 bits, found {M} and {bits}"
    if linear_block_k(group) != LINEAR_MAX_BLOCK_K or not linear_digits_fit(M, K):
        return f"takes groups divisible by {LINEAR_MAX_BLOCK_K}, found {group} of {K} inputs"
    if tile.block_n not in (16, 32, 64):
        return f"block_n must be 16, 32 or 64, found {tile.block_n}"
    if tile.warps not in (1, 2, 4, 8, 16) or not 1 <= tile.ahead <= MAX_STAGES:
        return (
            f"warps must be a power of two up to 16 and ahead 1 to {MAX_STAGES},"
            f" found {tile.warps} and {tile.ahead}"
        )
    return None


def linear_hopper_tile_fault(
    tile: LinearHopperTile, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """None: the kernel can run it on a GPU of at least `tile.blocks` SMs."""
    if tile.bits != bits or bits not in (4, 8):
        return f"is for {tile.bits} bits, of 4 and 8, found {bits}"
    if linear_block_k(group) != LINEAR_MAX_BLOCK_K:
        return f"takes groups divisible by {LINEAR_MAX_BLOCK_K}, found {group}"
    if (tile.parts, tile.block_m) not in LINEAR_HOPPER_SIZES:
        return f"parts and block_m must be of {LINEAR_HOPPER_SIZES}, found {tile}"
    if tile.split not in LINEAR_HOPPER_SPLITS or tile.blocks < 1:
        return f"split must be of {LINEAR_HOPPER_SPLITS} and blocks at least 1, found {tile}"
    if tile.halves and (tile.block_m < 256 or tile.split > 1):
        return f"halves are for tiles of 256 rows and whole K, found {tile}"
    if tile.block_m == 64 and M > 64:
        return f"tiles of 64 rows are for at most 64, found {M}"
    if not tile.fits(M, N, K):
        return f"its parts of K need steps, blocks that run at once and workspace, found {tile}"
    return None


def linear_ring_tile_fault(
    tile: LinearRingTile, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """None: the kernel can run it."""
    if bits != 4 or linear_block_k(group) != LINEAR_MAX_BLOCK_K:
        return f"takes 4 bits and groups divisible by 128, found {bits} and {group} of {K} inputs"
    if tile.rows not in LINEAR_RING_ROWS or tile.rows < M:
        return (
            f"rows must be of {LINEAR_RING_ROWS} and at least the {M} of the problem,"
            f" found {tile.rows}"
        )
    if tile.split < 1 or not 1 <= tile.stages <= MAX_STAGES:
        return (
            f"split must be at least 1 and stages 1 to {MAX_STAGES},"
            f" found {tile.split} and {tile.stages}"
        )
    if not tile.fits(N, K):
        return f"the workspace does not hold {tile.split} parts of [{N}, {K}], or some have no step"
    return None


def int8_tile_fault(tile: Int8Tile, *, M: int, N: int, K: int, integers: bool = True) -> str | None:
    """None: the kernel can run it."""
    left, right = tile.block_m, tile.block_n
    if tile.weight_left:
        left, right = right, left
    if tile.block_k not in (64, 128, 256):
        return f"block_k must be 64, 128 or 256, found {tile.block_k}"
    if not integers and tile.block_k < 128:
        return f"a float8 sum is emptied every 128 inputs: block_k is less, {tile.block_k}"
    if tile.tiles_m_of_group < 1:
        return f"tiles_m_of_group must be at least 1, found {tile.tiles_m_of_group}"
    tiles = ceil_div(N, max(1, tile.block_n)) * ceil_div(M, max(1, tile.block_m))
    return (
        _launch_fault(left, tile.warps, tile.stages, least=WARPGROUP_ROWS, most=256)
        or _launch_fault(right, tile.warps, tile.stages, least=16, most=256)
        or _split_fault(tile.split, ceil_div(K, tile.block_k), tiles, M * N)
    )  # fmt: skip


def int8_hopper_tile_fault(
    tile: Int8HopperTile, *, M: int, N: int, K: int, integers: bool = True
) -> str | None:
    """None: the kernel can run it on a GPU of enough SMs, which the tile's `fits` knows."""
    if tile.parts not in (1, 2, 3) or tile.part not in (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS):
        return f"parts must be 1 to 3 and part 64 or 128, found {tile.parts} and {tile.part}"
    least = 16 if tile.weight_left else WARPGROUP_ROWS  # the weight is copied 64 rows at a time
    if not _is_power(tile.block_right, least, 256):
        return f"block_right must be a power of two from {least} to 256, found {tile.block_right}"
    if tile.weight_left and tile.part > WARPGROUP_ROWS:
        return "part is 128 where x is left"
    if tile.idle_rows not in INT8_HOPPER_IDLE_ROWS or N % tile.part_rows and tile.idle_rows:
        return f"idle_rows must be of {INT8_HOPPER_IDLE_ROWS} and divide {N} outputs, found {tile}"
    if tile.idle_rows and not (tile.weight_left and tile.part == WARPGROUP_ROWS):
        return f"idle rows are the weight's, of 64, found {tile}"
    if tile.split not in INT8_HOPPER_SPLITS or tile.split > ceil_div(K, INT8_HOPPER_BLOCK_K):
        return f"split must be of {INT8_HOPPER_SPLITS} and leave each part a step, found {tile}"
    if tile.meet and (tile.split == 1 or tile.share < 16):
        return f"parts that meet are several and store at least 16 columns each, found {tile}"
    allowed = (0,) if integers else (1, 2) if M <= 64 else (1,)
    if tile.steps_of_sum not in allowed:
        return f"steps_of_sum must be of {allowed} at {M} rows, found {tile.steps_of_sum}"
    if tile.stores not in (1, 2) or tile.blocks_per_sm not in (1, 2):
        return f"stores and blocks_per_sm must be 1 or 2, found {tile}"
    if tile.max_first_stages < 1 or not 1 <= tile.left_of_group <= INT8_HOPPER_MAX_GROUP:
        return f"left_of_group or max_first_stages is out of range: {tile}"
    if not tile.fits_sm or not tile.fits_thread:
        return f"registers or shared memory of an SM do not hold it: {tile}"
    if tile.split > 1 and not tile.fits_workspace(M, N):
        return f"the workspace does not hold {tile.split} parts of [{M}, {N}]"
    return None


def attention_tile_fault(tile: AttentionTile, *, heads_per_kv_head: int, **_: object) -> str | None:
    """None: the kernel can run it."""
    group = power_of_two(heads_per_kv_head)
    if tile.block_m != tile.block_q * group:
        return f"block_m must be block_q times {group}, found {tile.block_m} and {tile.block_q}"
    if tile.gluon:
        return "gluon is for 8-bit pages, which no table is for"
    if not _is_power(tile.keys, 16, 256):
        return f"keys must be a power of two from 16 to 256, found {tile.keys}"
    if not _is_power(tile.split, 1, ATTENTION_MAX_SPLIT):
        return f"split must be a power of two up to {ATTENTION_MAX_SPLIT}, found {tile.split}"
    return _launch_fault(tile.block_m, tile.warps, tile.stages, least=16, most=256)


def _launch_fault(block_m: int, warps: int, stages: int, *, least: int, most: int) -> str | None:
    if not _is_power(block_m, least, most):
        return f"a block must be a power of two from {least} to {most}, found {block_m}"
    if warps not in (1, 2, 4, 8, 16):
        return f"warps must be 1, 2, 4, 8 or 16, found {warps}"
    if not 1 <= stages <= MAX_STAGES:
        return f"stages must be 1 to {MAX_STAGES}, found {stages}"
    return None


def _split_fault(split: int, steps: int, tiles: int, outputs: int) -> str | None:
    if not 1 <= split <= steps:
        return f"split must be 1 to {steps}, the steps of K, found {split}"
    if split > 1 and split * outputs > LINEAR_WORKSPACE_FLOATS:
        return f"split {split} of {outputs} outputs overruns the workspace"
    if split > 1 and tiles > LINEAR_COUNTERS:
        return f"{tiles} tiles cannot be split: there are {LINEAR_COUNTERS} counters"
    return None


def _is_power(n: int, least: int, most: int) -> bool:
    return least <= n <= most and n == power_of_two(n)
