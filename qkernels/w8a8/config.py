"""Tile choices of the 8-bit products, portable and for Hopper, as the config makes them.

Legend: M rows of x, N outputs, K inputs. Microseconds are an H200's, bf16, cold weights, calls
inside one CUDA graph; qkv is [6144, 4096], o [4096, 4096], gate_up [28672, 4096], down [4096,
14336].
"""

from dataclasses import dataclass, replace

from qkernels.gpu.config import (
    HOPPER_SHARED_BYTES,
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
    """How one W8A8 product is cut. The grid is [all output tiles, split]."""

    block_m: int
    block_n: int
    block_k: int = 128
    split: int = 1  # parts of K that different blocks sum
    warps: int = 4
    stages: int = 4
    weight_left: bool = True  # y^T = W x^T: few rows then fill the narrow side of the tensor core
    pdl: bool = True  # start while the kernel before it ends
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
def default_w8a8_triton_config(
    M: int, N: int, K: int, sm_count: int, integers: bool = True
) -> W8A8TritonConfig:
    """The tile for M >= 1 rows of int8 codes, or of float8 ones."""
    if M <= 64:
        block_m = max(16, power_of_two(M))
        if ceil_div(N, 128) >= 1.5 * sm_count:
            return W8A8TritonConfig(block_m=block_m, block_n=128)
        # 128 KB of stages at 64 rows leave room for one block on an SM
        blocks_per_sm = 1 if block_m == 64 else 2
        split = _int8_split(M, N, ceil_div(N, 64), ceil_div(K, 256), 14, blocks_per_sm * sm_count)
        return W8A8TritonConfig(block_m=block_m, block_n=64, block_k=256, split=split)
    rows = ceil_div(M, 128)
    large = rows * ceil_div(N, 256)
    if M <= 256 and large < 0.75 * sm_count:
        tiles = rows * ceil_div(N, 64)
        split = _int8_split(M, N, tiles, ceil_div(K, 128), 28, 2 * sm_count)
        stages = 6 if split * tiles <= sm_count else 4
        return W8A8TritonConfig(block_m=128, block_n=64, split=split, stages=stages)
    pdl = M <= 256
    if not integers:  # sums of float8 take twice the registers
        return W8A8TritonConfig(block_m=128, block_n=128, warps=8, weight_left=False, pdl=pdl)
    if 2 * large <= sm_count:
        return W8A8TritonConfig(block_m=128, block_n=128, weight_left=False, pdl=pdl)
    return W8A8TritonConfig(block_m=128, block_n=256, warps=8, weight_left=False, pdl=pdl)


def fitted(tile: W8A8TritonConfig, shared_bytes: int) -> W8A8TritonConfig:
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
        and split * M * N <= WORKSPACE_FLOATS
        and tiles <= WORKSPACE_COUNTERS
    )
    return next(fits, 1)


SM90_BLOCK_K = 128  # bytes of a row in one stage: the widest swizzle of shared memory
INT8_HOPPER_BOX = 64  # weight rows that lie side by side, 8 KB of a step
SM90_IDLE_ROWS = (0, 16, 32)
SM90_SPLITS = (1, 2, 4)
SM90_MAX_GROUP = 64  # left tiles beside each other
_INT8_HOPPER_LEAST_STAGES = 3
_REGISTERS = 65536  # of an SM


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8Sm90Config(CompileTimeConfig):
    """How w8a8/sm90.py cuts one product. The grid is as many blocks as run at once."""

    parts: int  # warpgroups that multiply, each its own rows of the left operand
    block_right: int
    part: int = 64  # rows of the left operand for each warpgroup
    idle_rows: int = 0  # of them without a weight row: smaller tiles, for more SMs
    split: int = 1  # parts of K that different blocks sum
    reduce_scatter: bool = (
        False  # the parts share the result's columns; else the last to end has them all
    )
    weight_left: bool = True  # the weight's rows are the left operand's
    left_of_group: int = 8  # left tiles that run beside each other
    steps_of_sum: int = 0  # steps between two emptyings of a float8 sum; 0: integers
    stores: int = 2  # pieces of the result on their way out, of each warpgroup
    max_stages: int = 24
    blocks_per_sm: int = 1
    # Asked for before the block waits for the kernel before. An SM's copies queue up, and those of
    # x behind too many of the weight's: us of qkv at 16 rows, down at 64, x rounded, of 2, 4, 8 and
    # all (22, 13) stages 9.7 / 9.5 / 9.2 / 9.6 and 19.8 / 19.8 / 19.6 / 20.1
    max_first_stages: int = 8

    @property
    def block_left(self) -> int:
        """Rows of the left operand in a stage."""
        return self.parts * self.part

    @property
    def part_rows(self) -> int:
        """Outputs, or rows of x, that a warpgroup stores."""
        return self.part - self.idle_rows

    @property
    def weight_box(self) -> int:
        """Weight rows of one copy: side by side in a box of 64, wherever a part begins."""
        return min(INT8_HOPPER_BOX, self.part_rows & -self.part_rows)

    @property
    def share(self) -> int:
        """Columns of the result that a block stores of a tile."""
        return self.block_right // self.split if self.reduce_scatter else self.block_right

    @property
    def store_width(self) -> int:
        """Columns of a piece of the result; with 64 three warpgroups spill registers."""
        return min(32 if self.parts == 3 else 64, self.share)

    @property
    def stages(self) -> int:
        """As many as shared memory holds beside the pieces of the result and the barriers."""
        stores = self.parts * self.stores * self.part * self.store_width * 2
        stage = (self.block_left + self.block_right) * SM90_BLOCK_K + 16
        shared = (HOPPER_SHARED_BYTES + 1024) // self.blocks_per_sm - 1024  # 1 KB is the system's
        factors = self.parts * self.column_factors * self.share * 4 * self.factors_in_shared
        return min(self.max_stages, (shared - 512 - stores - factors) // stage)

    @property
    def first_stages(self) -> int:
        return min(self.stages, self.max_first_stages)

    @property
    def registers(self) -> int:
        """Of each thread at launch; then the copying warpgroup gives its own to the others."""
        if self._registers_of_sums < 64:
            return 96 if self.blocks_per_sm == 1 else 80
        return 168 if self._registers_of_sums > 64 and self.parts == 2 else 128

    @property
    def _registers_of_sums(self) -> int:
        return self.part * self.block_right // 128 * (2 if self.steps_of_sum else 1)

    @property
    def factors_in_shared(self) -> bool:
        """Whether factors of columns go to the threads that need them at the end of a product.

        A thread loads one or two of them before it. Each needs 16 to 64, for which there is no room
        beside more than 64 sums.
        """
        # us of qkv / gate_up at 1024 rows of codes: 34.6 / 159, each loaded when needed 36.3 / 164
        return self._registers_of_sums > 64

    @property
    def column_factors(self) -> int:
        """Vectors that spread over columns: x's scales, or scales and biases of the weight."""
        return 1 if self.weight_left else 2

    @property
    def consumer_registers(self) -> int:
        return ((self.parts + 1) * self.registers - 24) // self.parts // 8 * 8

    @property
    def fits_sm(self) -> bool:
        """Whether as many blocks as there should be have registers and a ring on an SM."""
        threads = self.blocks_per_sm * (self.parts + 1) * 128
        return threads * self.registers <= _REGISTERS and self.stages >= _INT8_HOPPER_LEAST_STAGES

    @property
    def fits_thread(self) -> bool:
        """Whether a multiplying thread has registers for its sums and for factors loaded ahead."""
        factors = 4 if self.factors_in_shared else self.share // 4
        needs = self._registers_of_sums + factors + 24
        return self._registers_of_sums <= 128 and needs <= self.consumer_registers

    def tiles(self, M: int, N: int) -> int:
        left, right = (N, M) if self.weight_left else (M, N)
        return ceil_div(left, self.parts * self.part_rows) * ceil_div(right, self.block_right)

    def fits(self, M: int, N: int, sm_count: int) -> bool:
        """Whether parts of K have places, those that meet all at once, on so many SMs."""
        if self.idle_rows and N % self.part_rows:
            return False  # the copy engine cuts idle rows off where a part ends, so none may be cut
        if self.split == 1:
            return True
        places = sm_count * self.blocks_per_sm
        runs = not self.reduce_scatter or self.tiles(M, N) * self.split <= places
        return runs and self.fits_workspace(M, N)

    def fits_workspace(self, M: int, N: int) -> bool:
        """Whether the partial sums of all parts have a slot, and their warpgroups a counter."""
        slots = self.tiles(M, N) * self.split * self.block_left * self.block_right
        counters = self.tiles(M, N) * self.parts
        return slots <= WORKSPACE_FLOATS and counters <= WORKSPACE_COUNTERS


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
        (W8A8Sm90Config(parts=1, block_right=128), 0.7),
        (W8A8Sm90Config(parts=2, block_right=128), 1.08),
        (W8A8Sm90Config(parts=2, block_right=256), 2.0),
        (
            W8A8Sm90Config(
                parts=2,
                part=128,
                block_right=128,
                weight_left=False,
                left_of_group=16,
                stores=1,
            ),
            1.98,
        ),
        (W8A8Sm90Config(parts=3, block_right=256), 3.06),
    ),
    # a float8 sum takes twice the registers: qkv / gate_up at 4096 rows 164 / 794. A step's sum is
    # waited for, so two warpgroups take turns: qkv at 128 rows 11.3, with one of 128 columns 13.1
    "float": (
        (W8A8Sm90Config(parts=2, block_right=64, steps_of_sum=1), 0.7),
        (
            W8A8Sm90Config(
                parts=2, block_right=128, weight_left=False, left_of_group=16, steps_of_sum=1
            ),
            1.08,
        ),
    ),
    # with the weight left, each thread would load a scale for a quarter of x's rows in every step:
    # qkv at 128 rows 40.7
    "blocks": (
        (W8A8Sm90Config(parts=2, block_right=64, weight_left=False, steps_of_sum=1), 0.7),
        (
            W8A8Sm90Config(
                parts=2, block_right=128, weight_left=False, left_of_group=16, steps_of_sum=1
            ),
            1.08,
        ),
    ),
}

# three warpgroups have no registers left for zero points
_INT8_HOPPER_TILES["asymmetric"] = _INT8_HOPPER_TILES["int"][:-1]


def default_sm90_config(M: int, N: int, K: int, sm_count: int, kind: str = "int") -> W8A8Sm90Config:
    """The tile for M >= 1 rows.

    `kind`: "int", "asymmetric" where x has zero points, "float", or "blocks" of float8 with scales
    of their own.
    """
    if M <= 64:
        return _default_config_of_few_rows(M, N, K, sm_count, kind)

    def time(row: tuple[W8A8Sm90Config, float]) -> float:
        tile, cost = row
        return ceil_div(tile.tiles(M, N), sm_count) * cost

    # gate_up at 256 rows, rounding included: 54.5 in 256 x 128, 52.3 in 128 x 256
    rows = [row for row in _INT8_HOPPER_TILES[kind] if row[0].part == 64 or M > 256]
    tile, _ = min(rows, key=time)
    if kind == "int" and tile.parts == 1:
        smaller = _with_idle_rows(tile, M, N, K, sm_count)
        if smaller != tile:
            return smaller
    # us at 128 rows, x rounded, in 2 parts that meet: down 23.4 (25.5 where the last of them adds
    # up), o 9.6 (10.5 in one part). Of codes o is faster in one, 7.7 and 8.8: its 64 blocks leave
    # other SMs to those of the next product
    halves = replace(tile, split=2, reduce_scatter=True)
    worth = ceil_div(K, SM90_BLOCK_K) >= (56 if tile.steps_of_sum else 32)
    return halves if worth and halves.fits(M, N, sm_count) else tile


def sm90_search_starts(M: int, integers: bool) -> list[W8A8Sm90Config]:
    """Tiles of every size that a choice is made from: where a search on another GPU begins."""
    if M > 64:
        return [tile for tile, _ in _INT8_HOPPER_TILES["int" if integers else "float"]]
    one = W8A8Sm90Config(
        parts=1, block_right=max(16, power_of_two(M)), steps_of_sum=0 if integers else 2
    )
    two = replace(one, parts=2)
    return [one, two, replace(one, blocks_per_sm=2), replace(two, blocks_per_sm=2)]


# us, rounding x to int8 included, of qkv / o / gate_up / down:
# M = 1    two warpgroups 9.6 / 8.4 / 33.5 / -     one 10.7 / 8.1 / 34.6 / 19.4
#          two, two blocks an SM - / - / 31.8 / -  one, 4 parts, two blocks 10.6 / 7.7 / - / 19.6
# M = 16   two 10.0 / 8.5 / 33.3 / 20.8            one 9.7 / 9.2 / 34.8 / 20.1
#          two, two blocks an SM - / - / 32.0 / -  one, 4 parts, two blocks 10.3 / 7.8 / - / 20.2
# M = 32   two 10.3 / 8.7 / 32.6 / 22.4            one 9.2 / 8.3 / 34.7 / 20.5, two blocks 32.0
# M = 64   two 11.0 / 9.2 / 33.3 / 25.1            one 10.1 / 8.3 / 34.9 / 20.5, two blocks 33.6
def _default_config_of_few_rows(M: int, N: int, K: int, sm_count: int, kind: str) -> W8A8Sm90Config:
    if kind == "blocks":
        if (
            M > 16
        ):  # see _INT8_HOPPER_TILES: with the weight left qkv takes 15.0 us at 64 rows, int8 8.8
            return W8A8Sm90Config(parts=1, block_right=64, weight_left=False, steps_of_sum=1)
        return W8A8Sm90Config(parts=2, block_right=16, steps_of_sum=1)
    tile = W8A8Sm90Config(
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
        has_steps = ceil_div(K, SM90_BLOCK_K) >= 4
        return quarters if has_steps and quarters.fits_workspace(M, N) else tile
    if kind == "int" and M > 32:
        return _with_idle_rows(tile, M, N, K, sm_count)
    return replace(tile, parts=2 if M <= 8 else 1)


# us, x rounded (of codes), in tiles of 64 outputs / of fewer: qkv in 48 at 64 rows 9.8 (8.7) / 9.5
# (8.4), at 128 11.1 (9.5) / 10.5 (9.6), at 32 9.1 (8.7) / 9.9 (8.7); in 32 o at 128 9.7 (8.9), in
# parts that meet, / 9.3 (8.5), o at 64 7.9 (6.6) / 8.4 (7.1), down at 64 19.7 (17.7) / 20.9 (18.5)
def _with_idle_rows(tile: W8A8Sm90Config, M: int, N: int, K: int, sm_count: int) -> W8A8Sm90Config:
    """The tile made smaller for SMs that would have none: what an SM takes in is waited for.

    Few rows of x are less to take in than what free SMs save the next product. The numbers of rows
    between those that were measured, and K far from 4096, keep what they had.
    """
    most = 32 if 96 < M <= 128 else 16 if 56 < M <= 128 else 0
    if not 32 <= ceil_div(K, SM90_BLOCK_K) < 64:
        most = 0
    tiles = [replace(tile, idle_rows=idle) for idle in SM90_IDLE_ROWS if idle <= most]
    fit = [each for each in tiles if each.fits(M, N, sm_count) and each.tiles(M, N) <= sm_count]
    return max(fit, key=lambda each: each.tiles(M, N), default=tile)


def w8a8_triton_config_fault(
    tile: W8A8TritonConfig, *, M: int, N: int, K: int, integers: bool = True
) -> str | None:
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
        launch_fault(left, tile.warps, tile.stages, least=WARPGROUP_ROWS, most=256)
        or launch_fault(right, tile.warps, tile.stages, least=16, most=256)
        or split_fault(tile.split, ceil_div(K, tile.block_k), tiles, M * N)
    )  # fmt: skip


def w8a8_sm90_config_fault(
    tile: W8A8Sm90Config, *, M: int, N: int, K: int, integers: bool = True
) -> str | None:
    """None: the kernel can run it on a GPU of enough SMs, which the tile's `fits` knows."""
    if tile.parts not in (1, 2, 3) or tile.part not in (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS):
        return f"parts must be 1 to 3 and part 64 or 128, found {tile.parts} and {tile.part}"
    least = 16 if tile.weight_left else WARPGROUP_ROWS  # the weight is copied 64 rows at a time
    if not is_power(tile.block_right, least, 256):
        return f"block_right must be a power of two from {least} to 256, found {tile.block_right}"
    if tile.weight_left and tile.part > WARPGROUP_ROWS:
        return "part is 128 where x is left"
    if tile.idle_rows not in SM90_IDLE_ROWS or N % tile.part_rows and tile.idle_rows:
        return f"idle_rows must be of {SM90_IDLE_ROWS} and divide {N} outputs, found {tile}"
    if tile.idle_rows and not (tile.weight_left and tile.part == WARPGROUP_ROWS):
        return f"idle rows are the weight's, of 64, found {tile}"
    if tile.split not in SM90_SPLITS or tile.split > ceil_div(K, SM90_BLOCK_K):
        return f"split must be of {SM90_SPLITS} and leave each part a step, found {tile}"
    if tile.reduce_scatter and (tile.split == 1 or tile.share < 16):
        return f"parts that meet are several and store at least 16 columns each, found {tile}"
    allowed = (0,) if integers else (1, 2) if M <= 64 else (1,)
    if tile.steps_of_sum not in allowed:
        return f"steps_of_sum must be of {allowed} at {M} rows, found {tile.steps_of_sum}"
    if tile.stores not in (1, 2) or tile.blocks_per_sm not in (1, 2):
        return f"stores and blocks_per_sm must be 1 or 2, found {tile}"
    if tile.max_first_stages < 1 or not 1 <= tile.left_of_group <= SM90_MAX_GROUP:
        return f"left_of_group or max_first_stages is out of range: {tile}"
    if not tile.fits_sm or not tile.fits_thread:
        return f"registers or shared memory of an SM do not hold it: {tile}"
    if tile.split > 1 and not tile.fits_workspace(M, N):
        return f"the workspace does not hold {tile.split} parts of [{M}, {N}]"
    return None
