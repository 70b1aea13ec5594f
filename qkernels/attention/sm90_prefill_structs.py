"""Named structs that the warps of sm90_prefill.py share: arguments, pipelines, tiles.

A row is one token of one query head; the rows of all heads that share a KV head are adjacent. A
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
CONSUMER_ROWS = gl.constexpr(PREFILL_ROWS // 2)  # rows of each of the two consumer warpgroups
KEYS = gl.constexpr(PREFILL_KEYS)  # keys per step, with a head dim up to 128
WIDE_KEYS = gl.constexpr(PREFILL_WIDE_KEYS)  # keys per step, with a head dim above 128
STAGES = gl.constexpr(PREFILL_STAGES)  # pipeline stages of keys, and of values
TILE_STAGES = gl.constexpr(2)  # stages of tiles, and with a head dim up to 128 of their queries
CODE_STAGES = gl.constexpr(3)  # stages of 8-bit codes, of keys and values in turn
CODE_ROWS = gl.constexpr(64)  # keys, or values, whose codes fill a stage
COLUMNS = gl.constexpr(64)  # 128 bytes of 16-bit numbers: the widest swizzled row

# 32-bit words of a tile in shared memory
TILE_WORDS = gl.constexpr(8)
REQUEST = gl.constexpr(0)  # -1: no tile is left
START = gl.constexpr(1)
COUNT = gl.constexpr(2)
LENGTH = gl.constexpr(3)
FIRST_ROW = gl.constexpr(4)
KV_HEAD = gl.constexpr(5)
SPLIT = gl.constexpr(6)


@aggregate
class Attention:
    """Arguments of the kernel."""

    q_ptr: gl.tensor  # [T, H, D]
    k_desc: tma.tensor_descriptor  # [P, B, J, D], boxes of a page, a head and up to 128 bytes
    v_desc: tma.tensor_descriptor
    k_scales_ptr: gl.tensor | gl.constexpr  # [P, B, J] with 8-bit KV, else None
    v_scales_ptr: gl.tensor | gl.constexpr
    tables_ptr: gl.tensor  # [R, X]
    starts_ptr: gl.tensor  # [R + 1]
    lengths_ptr: gl.tensor  # [R]
    out_ptr: gl.tensor  # [T, H, D]; written if NUM_SPLITS is 1
    partials_ptr: gl.tensor | gl.constexpr  # [T, H, S, D]: each split's weighted sum of values
    sums_ptr: gl.tensor | gl.constexpr  # [2, T, H, S]: each split's largest score, sum of weights
    sinks_ptr: gl.tensor | gl.constexpr  # [H] scores of attention sinks, or None
    counter_ptr: gl.tensor  # number of the next work tile: 0 before and after the kernel
    R: gl.tensor
    T: gl.tensor
    num_work_tiles: gl.tensor
    num_computed_tiles: gl.tensor  # the others belong to requests before the first one computed
    scale: gl.tensor  # makes scores base-2 logarithms, for exp2; with SOFT_CAP, in units of the cap
    cap_log2: gl.tensor  # with SOFT_CAP: the cap as a base-2 logarithm
    window: gl.tensor  # with WINDOWED: keys that a row sees
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
    KEYS: gl.constexpr  # keys per step
    B: gl.constexpr
    WINDOWED: gl.constexpr
    SOFT_CAP: gl.constexpr
    NUM_SPLITS: gl.constexpr
    KV_8BIT: gl.constexpr
    IS_INT: gl.constexpr  # 8-bit KV: int8, not float8
    UNIFORM: gl.constexpr  # 8-bit KV: one scale for all keys of a head, and one for all values
    BY_SEGMENT: gl.constexpr  # each step's values are summed from zero, then folded into the sums


@aggregate
class SharedMemory:
    """The pipelines. Comments name each one's producer, and its consumers in brackets."""

    tiles: Pipeline  # words, from load_pages [all others]
    q: Pipeline  # [stages * 2, CONSUMER_ROWS, PADDED_D], from load_queries [attend]
    k: Pipeline  # [STAGES, KEYS, PADDED_D], from load_pages or dequantize_pages [attend]
    v: Pipeline
    codes: base_value  # 8-bit KV: [CODE_STAGES, CODE_ROWS, PADDED_D], from load_pages [dequantize]
    # 8-bit KV: float32 [STAGES * NUM_VECTORS, KEYS], full and empty with `k`
    vectors: base_value


@aggregate
class Tile:
    """One tile of query rows."""

    start: integer  # the request's first row of tokens
    count: integer  # its tokens in this step
    length: integer  # keys of its context
    first_row: integer  # first row of the tile
    kv_head: integer
    split: integer

    @gluon.jit
    def steps(self, attention):
        """Return the first key that the tile attends to, and its range of one step or more."""
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
    """The steps of keys that a tile's rows see."""

    first_key: integer
    first: integer
    last: gl.tensor  # one past the tile's last step


@gluon.jit
def tile_word(tiles, count, WORD: gl.constexpr):
    """Read a word of tile number `count`, whose stage must not be released yet."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    word = tiles.consumer_at(count).stage * TILE_WORDS + WORD
    return gl.max(tiles.mem.index(word).load(layout), 0)


@gluon.jit
def wait_tile(tiles, count):
    """Wait for tile number `count`. Return True if it exists."""
    tiles.consumer_wait(tiles.consumer_at(count))
    return tile_word(tiles, count, REQUEST) >= 0
