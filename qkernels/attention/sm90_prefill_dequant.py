"""The warps of sm90_prefill.py that dequantize 8-bit KV, in Gluon.

TMA loads codes unchanged into stages of shared memory. Four warps convert them to float16, exactly,
in the layout that wgmma reads, while it multiplies other steps.

Scales are not multiplied into keys or values, so nothing is rounded for them. Scales of keys
multiply the scores. Scales of values go into the exponent of the weights: their base is the largest
product of weight and scale so far, so no weight can leave float16's range. The sum of weights
divides each by its scale.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from qkernels.attention.sm90_prefill_load import zero_tail
from qkernels.attention.sm90_prefill_structs import (
    CODE_ROWS,
    COUNT,
    FIRST_ROW,
    KEYS,
    KV_HEAD,
    LENGTH,
    REQUEST,
    SPLIT,
    Tile,
    tile_word,
    wait_tile,
)
from qkernels.gpu.gluon_compat import aggregate, integer
from qkernels.gpu.registers import FLOAT8_TO_HALF, INT_TO_HALF

CODES_OF_LANE = gl.constexpr(16)  # 8-bit codes that a lane reads together

# vectors of a step, [NUM_VECTORS, KEYS]: factors of the scores, logarithms of the values' scales,
# inverses of the values' scales
NUM_VECTORS = gl.constexpr(3)
KEY_SCALES = gl.constexpr(0)
LOG_VALUE_SCALES = gl.constexpr(1)
INVERSE_VALUE_SCALES = gl.constexpr(2)
TINY = gl.constexpr(1e-30)  # replaces a scale of zero, which has no logarithm


@aggregate
class _HeadScales:
    """Scales of the keys and values of a tile's KV head."""

    k_ptr: gl.tensor
    v_ptr: gl.tensor
    table: gl.tensor
    first_key: integer  # first key that may be read
    end: gl.tensor

    @gluon.jit
    def pages(self, key, attention):
        exists = (key >= self.first_key) & (key < self.end)
        return gl.load(self.table + key // attention.B, mask=exists, other=0).to(gl.int64)

    @gluon.jit
    def load(self, page, key, attention):
        """Load the scales of keys and values; 0 and 1 for keys that may not be read."""
        B: gl.constexpr = attention.B
        exists = (key >= self.first_key) & (key < self.end)
        k_rows = page * attention.stride_ksp + key % B * attention.stride_ksb
        v_rows = page * attention.stride_vsp + key % B * attention.stride_vsb
        k_scale = gl.load(self.k_ptr + k_rows, mask=exists, other=0.0)
        return k_scale, gl.load(self.v_ptr + v_rows, mask=exists, other=1.0)


@gluon.jit
def dequantize_pages(attention, shared):
    """Run four warps that dequantize the codes of each step, from a tile's last step on."""
    B: gl.constexpr = attention.B
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offset = gl.arange(0, KEYS, layout)
    # the order in which key_vector reads the scales
    offset = offset // 16 * 16 + offset // 2 % 2 * 8 + offset // 4 % 4 * 2 + offset % 2
    tiles = 0
    n = 0
    while wait_tile(shared.tiles, tiles):
        count = tile_word(shared.tiles, tiles, COUNT)
        length = tile_word(shared.tiles, tiles, LENGTH)
        first_row = tile_word(shared.tiles, tiles, FIRST_ROW)
        kv_head = tile_word(shared.tiles, tiles, KV_HEAD)
        split = tile_word(shared.tiles, tiles, SPLIT)
        request = tile_word(shared.tiles, tiles, REQUEST)
        shared.tiles.consumer_release(shared.tiles.consumer_at(tiles))
        tile = Tile(
            start=0, count=count, length=length, first_row=first_row, kv_head=kv_head, split=split
        )
        steps = tile.steps(attention)
        ends_within = (length < steps.last * KEYS) & (length > (steps.last - 1) * KEYS)
        ends_within = ends_within & (length % B > 0)
        table = attention.tables_ptr + request.to(gl.int64) * attention.stride_table
        if not attention.UNIFORM:
            # scales of keys are loaded one step before their use, page numbers two steps before
            scales = _HeadScales(
                k_ptr=attention.k_scales_ptr + kv_head * attention.stride_ksj,
                v_ptr=attention.v_scales_ptr + kv_head * attention.stride_vsj,
                table=table,
                first_key=steps.first_key,
                end=length,
            )
            key = (steps.last - 1) * KEYS + offset
            page = scales.pages(key, attention)
            k_scale, v_scale = scales.load(page, key, attention)
            key -= KEYS
            page = scales.pages(key, attention)
        for i in range(steps.last - steps.first):
            stage = shared.k.producer_at(n).stage
            codes = n * (2 * KEYS // CODE_ROWS)
            shared.k.producer_acquire(shared.k.producer_at(n))
            if not attention.UNIFORM:
                v_scale = gl.where(v_scale < TINY, TINY, v_scale)
                vectors = shared.vectors
                scores_by = k_scale * attention.scale
                vectors.index(stage * NUM_VECTORS + KEY_SCALES).store(scores_by)
                vectors.index(stage * NUM_VECTORS + LOG_VALUE_SCALES).store(gl.log2(v_scale))
                vectors.index(stage * NUM_VECTORS + INVERSE_VALUE_SCALES).store(1.0 / v_scale)
            _dequantize(shared.codes, codes, shared.k, n, attention.IS_INT)
            fence_async_shared()
            shared.k.producer_commit(shared.k.producer_at(n))

            if not attention.UNIFORM:
                k_scale, v_scale = scales.load(page, key, attention)
                key -= KEYS
                page = scales.pages(key, attention)

            shared.v.producer_acquire(shared.v.producer_at(n))
            _dequantize(shared.codes, codes + KEYS // CODE_ROWS, shared.v, n, attention.IS_INT)
            # integers after the last key need no zeroing: an integer times a weight of zero is zero
            if not attention.IS_INT and (i == 0) & ends_within:
                zero_tail(shared.v, n, length, B)
            fence_async_shared()
            shared.v.producer_commit(shared.v.producer_at(n))
            n += 1
        tiles += 1


@gluon.jit
def _dequantize(codes, first, pipeline, n, IS_INT: gl.constexpr):
    """Dequantize a step's codes, from stage `first` on, into stage number `n` of `pipeline`."""
    # eight lanes read eight rows, whose swizzled 16 bytes lie in different banks; writes likewise
    layout: gl.constexpr = gl.BlockedLayout([1, CODES_OF_LANE], [8, 4], [4, 1], [0, 1])
    to_half: gl.constexpr = INT_TO_HALF if IS_INT else FLOAT8_TO_HALF
    for i in gl.static_range(KEYS // CODE_ROWS):
        state = codes.consumer_at(first + i)
        codes.consumer_wait(state)
        numbers = gl.inline_asm_elementwise(
            to_half,
            "=&r,=&r,r",
            [codes.mem.index(state.stage).load(layout)],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )
        stage = pipeline.mem.index(pipeline.producer_at(n).stage)
        stage.slice(i * CODE_ROWS, CODE_ROWS).store(numbers)
        codes.consumer_release(state)


# In the scores' layout a lane has two of every eight columns. Its columns of sixteen keys are
# adjacent in memory, so that one load reads them.
_KEYS_OF_LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [16], [32], [64]],
        lane_bases=[[4], [8], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[128],
    )
)


@gluon.jit
def key_vector(vectors, stage, VECTOR: gl.constexpr, layout: gl.constexpr):
    """Load one of a stage's NUM_VECTORS vectors of keys, one number per column of `layout`."""
    keys = vectors.index(stage * NUM_VECTORS + VECTOR).load(_KEYS_OF_LANES)
    keys = keys.reshape([KEYS // 16, 4, 2, 2]).permute([0, 2, 1, 3]).reshape([KEYS])
    return gl.convert_layout(keys, gl.SliceLayout(0, layout))
