"""Named structs that the warps of sm90_prefill.py share: arguments, pipelines, tiles.

A row is one token of one query head; the rows of all heads that share a KV head are neighbours. A
tile is ROWS rows of a request, with one KV head and one split of the context. A step is KEYS keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import base_value

from qkernels.attention.config import (
    PREFILL_KEYS,
    PREFILL_ROWS,
    PREFILL_STAGES,
    PREFILL_WIDE_KEYS,
)
from qkernels.gpu.gluon_compat import aggregate, integer
from qkernels.gpu.pipeline import Pipeline

ROWS = gl.constexpr(PREFILL_ROWS)
CONSUMER_ROWS = gl.constexpr(PREFILL_ROWS // 2)  # of one of the two consumer warpgroups
KEYS = gl.constexpr(PREFILL_KEYS)  # of a step; with heads of more than 128 WIDE_KEYS
WIDE_KEYS = gl.constexpr(PREFILL_WIDE_KEYS)
STAGES = gl.constexpr(PREFILL_STAGES)  # of keys, and of values
TILE_STAGES = gl.constexpr(2)  # of tiles, and of their queries, but for heads of more than 128
CODE_STAGES = gl.constexpr(3)  # of 8-bit codes, keys' and values' in turn
CODE_ROWS = gl.constexpr(64)  # keys, or values, whose codes fill a stage
COLUMNS = gl.constexpr(64)  # 128 bytes of 16-bit numbers: the widest row that is swizzled

# 32-bit words of a tile in shared memory
TILE_WORDS = gl.constexpr(8)
REQUEST = gl.constexpr(0)  # -1: there is no further tile
START = gl.constexpr(1)
COUNT = gl.constexpr(2)
LENGTH = gl.constexpr(3)
FIRST_ROW = gl.constexpr(4)
KV_HEAD = gl.constexpr(5)
SPLIT = gl.constexpr(6)


@aggregate
class Attention:
    """The kernel's arguments."""

    q_ptr: gl.tensor  # [T, H, D]
    k_desc: tma.tensor_descriptor  # [P, B, J, D], boxes of a page, a head and up to 128 bytes
    v_desc: tma.tensor_descriptor
    k_scales_ptr: gl.tensor | gl.constexpr  # [P, B, J] with 8-bit KV, else None
    v_scales_ptr: gl.tensor | gl.constexpr
    tables_ptr: gl.tensor  # [R, X]
    starts_ptr: gl.tensor  # [R + 1]
    lengths_ptr: gl.tensor  # [R]
    out_ptr: gl.tensor  # [T, H, D]; written where NUM_SPLITS is 1
    partials_ptr: gl.tensor | gl.constexpr  # [T, H, S, D]: each split's weighted sum of values
    sums_ptr: gl.tensor | gl.constexpr  # [2, T, H, S]: each split's largest score, sum of weights
    sinks_ptr: gl.tensor | gl.constexpr  # [H] scores of attention sinks, or None
    counter_ptr: gl.tensor  # the next work tile: 0 before and after the kernel
    R: gl.tensor
    T: gl.tensor
    num_work_tiles: gl.tensor
    scale: gl.tensor  # to scores in powers of two, since exp2 is the hardware's
    cap_log2: gl.tensor  # SOFT_CAP; `scale` is then to units of the cap
    window: gl.tensor  # keys that a row sees, where WINDOWED
    stride_qt: integer
    stride_qh: integer
    stride_table: gl.tensor
    stride_ksp: integer
    stride_ksb: integer
    stride_ksj: integer
    stride_vsp: integer
    stride_vsb: integer
    stride_vsj: integer
    H: gl.constexpr
    J: gl.constexpr
    GROUP: gl.constexpr  # query heads of a KV head
    D: gl.constexpr
    PADDED_D: gl.constexpr
    KEYS: gl.constexpr  # of a step
    B: gl.constexpr
    WINDOWED: gl.constexpr
    SOFT_CAP: gl.constexpr
    NUM_SPLITS: gl.constexpr
    KV_8BIT: gl.constexpr
    IS_INT: gl.constexpr  # 8-bit KV: int8, not float8
    UNIFORM: gl.constexpr  # 8-bit KV: one scale for all keys of a head, and one for all values
    BY_SEGMENT: gl.constexpr  # a step's values are summed from zero, then added to those before


@aggregate
class SharedMemory:
    """The pipelines, each with its producer, and its consumers in brackets."""

    tiles: Pipeline  # words, from load_pages [all others]
    q: Pipeline  # [stages * 2, CONSUMER_ROWS, PADDED_D], from load_queries [attend]
    k: Pipeline  # [STAGES, KEYS, PADDED_D], from load_pages or dequantize_pages [attend]
    v: Pipeline
    codes: base_value  # 8-bit KV: [CODE_STAGES, CODE_ROWS, PADDED_D], from load_pages [dequantize]
    # 8-bit KV: float32 [STAGES * NUM_VECTORS, KEYS], full and empty with `k`
    vectors: base_value


@aggregate
class Tile:
    start: integer  # the request's first row of tokens
    count: integer  # its tokens in this step
    length: integer  # keys of its context
    first_row: integer  # of the tile
    kv_head: integer
    split: integer

    @gluon.jit
    def steps(self, attention):
        """The first key that the tile sees, and its steps of keys: at least one."""
        GROUP: gl.constexpr = attention.GROUP
        KEYS: gl.constexpr = attention.KEYS
        before = self.length - self.count  # keys before the request's first row
        end = before + gl.minimum((self.first_row + ROWS - 1) // GROUP + 1, self.count)
        begin = 0
        if attention.WINDOWED:
            begin = gl.maximum(0, before + self.first_row // GROUP - attention.window + 1)
        first = begin // KEYS
        last = (end + KEYS - 1) // KEYS
        if attention.NUM_SPLITS > 1:
            steps = (last - first + attention.NUM_SPLITS - 1) // attention.NUM_SPLITS
            first += self.split * steps
            last = gl.minimum(last, first + steps)
        return TileSteps(first_key=begin, first=first, last=gl.maximum(last, first + 1))


@aggregate
class TileSteps:
    first_key: integer
    first: integer
    last: gl.tensor  # one past the tile's last step


@gluon.jit
def tile_word(tiles, count, WORD: gl.constexpr):
    """A word of tile number `count`, until its stage is released."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    word = tiles.consumer_at(count).stage * TILE_WORDS + WORD
    return gl.max(tiles.mem.index(word).load(layout), 0)


@gluon.jit
def wait_tile(tiles, count):
    """Wait for tile number `count`; True if it exists."""
    tiles.consumer_wait(tiles.consumer_at(count))
    return tile_word(tiles, count, REQUEST) >= 0
