"""Tile choices of the Hopper body of W4A16 and W8A16: problem sizes in, launch numbers out.

Plain Python.

Legend: M rows of x, N outputs, K inputs. Microseconds are an H200's, as in the config.
"""

import functools
from dataclasses import dataclass, replace

from qkernels.gpu.config import HOPPER_SHARED_BYTES, CompileTimeConfig, ceil_div
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.operands.limbs import K_STEP
from qkernels.wna16.layout import TILE_N, k_step, padded_n
from qkernels.wna16.triton_config import default_triton_config

_REGISTERS = 65536  # of an SM
_COPY_REGISTERS = 24  # of a thread of the warp that copies, where it gives its own to the others
_MAX_STAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeMConfig(CompileTimeConfig):
    """How one product is cut for the Hopper body: tiles of 64 parts outputs by block_m rows.

    A block makes several tiles, or with `split` one part of K of one tile.
    """

    blocks: int  # of the grid: at most one for each SM
    bits: int = 4  # of a code
    parts: int = 2  # warpgroups that multiply, 64 outputs each
    block_m: int = 128
    split: int = 1  # parts of K, which meet: the grid has a block for each
    halves: bool = False  # tiles beyond the last full round of blocks are cut in two along the rows

    @property
    def ahead(self) -> bool:
        """Whether products are in flight over the end of a step, and warps keep their registers.

        ptxas waits for each product in such a loop (C7512) where any warp of the block, be it one
        that copies, has less than about 128 registers.
        """
        return self.parts == 2 and self.block_m <= 128

    @property
    def piece(self) -> int:
        """Inputs of one product: 64 take 16 registers, 32 take 8."""
        return 64 if self.parts == 2 and not self.ahead else 32

    @property
    def pending(self) -> int:
        """Products in flight while the next one's weights are unpacked."""
        return 2 if self.ahead else 1

    @property
    def store_rows(self) -> int:
        """Rows of x in one piece of the result on its way out."""
        return 32 if self.block_m == 256 else self.block_m // self.split

    @property
    def store_buffers(self) -> int:
        """Of a warpgroup: the next piece is written while the copy engine reads the last."""
        return 2 if self.store_rows < self.block_m // self.split else 1

    @property
    def stages_of_step(self) -> int:
        """In how many stages the x of a step comes: of 256 rows it takes half of shared memory."""
        return 2 if self.block_m == 256 else 1

    @property
    def stages(self) -> int:
        """Stages of x that are on their way: as many as shared memory holds, up to 8."""
        stores = self.parts * self.store_buffers * TILE_N * self.store_rows * 2
        words = self.parts * TILE_N * K_STEP * self.bits // 8
        x = self.block_m * K_STEP * 2 // self.stages_of_step

        def num_bytes(stages: int) -> int:
            return stages * x + ceil_div(stages, self.stages_of_step) * words + stores + 512

        return max(n for n in range(1, _MAX_STAGES + 1) if num_bytes(n) <= HOPPER_SHARED_BYTES)

    @property
    def words_slots(self) -> int:
        """Steps whose words are on their way."""
        return ceil_div(self.stages, self.stages_of_step)

    @property
    def registers(self) -> int:
        """Of each thread at launch: of the multiplying warps and of the four that copy."""
        return _REGISTERS // (128 * (self.parts + 1)) // 8 * 8

    @property
    def copy_registers(self) -> int:
        return self.registers if self.ahead else _COPY_REGISTERS

    @property
    def multiply_registers(self) -> int:
        left = (self.parts + 1) * self.registers - self.copy_registers
        return left // self.parts // 8 * 8

    def tiles(self, M: int, N: int) -> int:
        return ceil_div(N, TILE_N * self.parts) * ceil_div(M, self.block_m)

    def on(self, M: int, N: int, sm_count: int) -> "LargeMConfig":
        """The same with the blocks that it takes for M rows on such a GPU."""
        units = self.tiles(M, N) * self.split * (2 if self.halves else 1)
        return replace(self, blocks=min(units, sm_count))

    def fits(self, M: int, N: int, K: int) -> bool:
        """Whether each part of K has a step and a block, and its sums a place in the workspace."""
        if self.split == 1:
            return True
        floats = self.tiles(M, N) * self.split * self.parts * TILE_N * self.block_m
        return (
            self.split <= K // K_STEP
            and self.tiles(M, N) * self.split <= self.blocks
            and floats <= WORKSPACE_FLOATS
            and self.tiles(M, N) * self.parts <= WORKSPACE_COUNTERS
        )


# bits -> us of one step of 128 inputs, for each (parts, block_m) that there is
_STEP = {
    4: {(2, 64): 0.5, (2, 128): 0.65, (3, 128): 0.99, (2, 256): 1.21},
    8: {(2, 64): 0.58, (2, 128): 0.72, (3, 128): 1.1, (2, 256): 1.27},
}

LARGE_M_SIZES = tuple(_STEP[4])
LARGE_M_SPLITS = (1, 2, 4)
_START = 5.2  # us of a launch, the first copies and the last store
_ROUND = 2.5  # us from one tile of a block to its next
_MEETING = 6e-3  # us for each row of a warpgroup's sums, where parts of K meet

# The portable body's, for its tiles of 64 outputs by at most 64 rows and by 128
_PORTABLE_START = 3.6
_PORTABLE_STEP = {4: {64: 0.55, 128: 0.95}, 8: {64: 0.65, 128: 1.15}}
_PORTABLE_MEETING = 0.3  # us for each part of K
_LIBRARY_RATE = 770  # operations of a us, in millions; dequantizing comes before it
_DEQUANTIZE_RATE = 3.7  # bytes of a us, in millions
_MIN_ROWS = 33  # below, most of a tile's rows would be empty


# Measured, us for qkv / o / gate_up / down, (parts, block_m, split), h for halves; in brackets the
# other one: the portable body, or up to 64 rows this one where it is not taken
# M = 64    12.8 (13.3) - / 10.1 (11.9) 2,64,4 / 34.5 (38.8) - / 21.4 (22.4) 2,64,4
# M = 128   16.4 (17.9) 3,128,4 / 12.2 (14.3) 2,128,4 / 50.8 (56.9) 2,128 / 26.9 (33.3) 2,128,4
# M = 256   23.2 (26.9) 3,128,2 / 17.0 (21.2) 2,128,2 / 86.0 2,256 / 44.0 (53.4) 2,256,4
# M = 512   37.0 3,128 / 26.4 (27.5) 2,128 / 158.1 2,256,h / 78.7 (94.2) 2,256,2
# M = 1024  68.9 (80.4) 2,256,h / 43.8 2,256 / 302.3 2,256 / 144.5 2,256
# M = 4096  304.6 2,256 / 203.8 2,256 / 1392 2,256,h / 689 2,256
# (Up to 64 rows of 4 bits the ring is asked first, and faster.)
# 8 bits, the same tiles but for gate_up at 64 rows:
# M = 64    14.8 - / 12.0 / 45.7 (49.0) 2,64 / 26.6 (28.1)
# M = 128   18.5 (22.5) / 13.3 (16.9) / 57.6 (68.7) / 31.3 (38.6)
# M = 256   25.3 (32.0) / 18.7 (23.7) / 90.2 (136.3) / 47.3 (62.1)
# M = 512   40.5 (63.0) / 28.3 (32.8) / 172.0 (253.2) / 82.4 (111.7)
@functools.lru_cache(maxsize=4096)
def default_large_m_config(
    M: int, N: int, K: int, group: int, bits: int, sm_count: int
) -> LargeMConfig | None:
    """The tile of the Hopper body for M rows; None: another way is faster, or it cannot."""
    if k_step(group) != K_STEP or M < _MIN_ROWS:
        return None
    best, least = None, _other_time(M, N, K, group, bits, sm_count)
    for parts, block_m in LARGE_M_SIZES:
        if block_m == 64 and M > 64:
            continue
        for split, halves in ((1, False), (2, False), (4, False), (1, True)):
            if halves and block_m < 256:
                continue
            tile = LargeMConfig(
                blocks=sm_count,
                bits=bits,
                parts=parts,
                block_m=block_m,
                split=split,
                halves=halves,
            )
            time = _time(tile, M, N, K)
            if tile.fits(M, N, K) and time < least:
                best, least = tile.on(M, N, sm_count), time
    return best


def _time(tile: LargeMConfig, M: int, N: int, K: int) -> float:
    """Microseconds, as measured tiles of these sizes add up."""
    step = _STEP[tile.bits][tile.parts, tile.block_m]
    steps = K / K_STEP / tile.split
    tiles = tile.tiles(M, N)
    if tile.halves:
        rounds, rest = divmod(tiles, tile.blocks)
        halves = ceil_div(2 * rest, tile.blocks)
        products = (
            rounds * step + halves * _STEP[tile.bits][tile.parts, tile.block_m // 2]
        ) * steps
        rounds += halves
    else:
        rounds = ceil_div(tiles * tile.split, tile.blocks)
        products = rounds * step * steps
    meeting = _MEETING * tile.parts * tile.block_m if tile.split > 1 else 0
    return _START + (rounds - 1) * _ROUND + products + meeting


def _other_time(M: int, N: int, K: int, group: int, bits: int, sm_count: int) -> float:
    """Microseconds of the portable body, or of dequantizing and the library."""
    portable = default_triton_config(M, N, K, group, sm_count)
    if portable is None:
        return 2e-6 * M * N * K / _LIBRARY_RATE + (2 + bits / 8) * 1e-6 * N * K / _DEQUANTIZE_RATE
    blocks = padded_n(N) // TILE_N * ceil_div(M, portable.block_m) * portable.split
    steps = K / K_STEP / portable.split
    waves = ceil_div(blocks, 2 * sm_count)
    products = waves * steps * _PORTABLE_STEP[bits][max(64, portable.block_m)]
    return _PORTABLE_START + products + _PORTABLE_MEETING * portable.split


def large_m_config_fault(
    tile: LargeMConfig, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """None: the kernel can run it on a GPU of at least `tile.blocks` SMs."""
    if tile.bits != bits or bits not in (4, 8):
        return f"is for {tile.bits} bits, of 4 and 8, found {bits}"
    if k_step(group) != K_STEP:
        return f"takes groups divisible by {K_STEP}, found {group}"
    if (tile.parts, tile.block_m) not in LARGE_M_SIZES:
        return f"parts and block_m must be of {LARGE_M_SIZES}, found {tile}"
    if tile.split not in LARGE_M_SPLITS or tile.blocks < 1:
        return f"split must be of {LARGE_M_SPLITS} and blocks at least 1, found {tile}"
    if tile.halves and (tile.block_m < 256 or tile.split > 1):
        return f"halves are for tiles of 256 rows and whole K, found {tile}"
    if tile.block_m == 64 and M > 64:
        return f"tiles of 64 rows are for at most 64, found {M}"
    if not tile.fits(M, N, K):
        return f"its parts of K need steps, blocks that run at once and workspace, found {tile}"
    return None
