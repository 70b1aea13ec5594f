"""The warps of sm90_prefill.py that turn 8-bit codes into the numbers of its products.

The copy engine puts codes as they are in slots of shared memory; four warps make float16 of them,
exactly, in the order that the tensor core reads, while it multiplies other steps.

No number is rounded for a scale. Those of keys multiply the scores. Those of values go into the
exponent of a weight, whose base is the largest product of weight and scale so far: it cannot leave
float16's range. The sum of the weights takes each over its scale.

Rings and tiles as in attention_hopper_load.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from qkernels.attention.sm90_prefill_load import (
    COUNT,
    FIRST_ROW,
    KEYS,
    KV_HEAD,
    LENGTH,
    PART,
    REQUEST,
    SLOTS,
    STAGES,
    fill,
    release,
    steps_of,
    wait_empty,
    wait_full,
    wait_tile,
    word_of_tile,
    zero_tail,
)
from qkernels.gpu.registers import FLOAT8_TO_HALF, INT_TO_HALF

PIECE = gl.constexpr(64)  # keys, or values, whose codes fill a slot
CODE_SLOTS = gl.constexpr(3)  # keys' and values', in turn
BYTES = gl.constexpr(16)  # codes that a lane reads at once

# vectors of a step beside its keys, [VECTORS, KEYS]: what scores are multiplied by, the logarithm
# of the values' scales, one over them
VECTORS = gl.constexpr(3)
TINY = gl.constexpr(1e-30)  # in place of a scale of zero, which has no logarithm


@gluon.jit
def unpack_pages(
    k_ring,
    v_ring,
    codes_ring,  # of CODE_SLOTS
    vectors,  # [STAGES * VECTORS, KEYS], handed over with the keys
    tile_ring,
    scales,  # (pointers of keys' and of values' scales; their strides of page, slot and head)
    tables_ptr,
    stride_table,
    scale,  # of all scores
    window,
    B: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOWED: gl.constexpr,
    SPLIT: gl.constexpr,
    IS_INT: gl.constexpr,
    UNIFORM: gl.constexpr,
):
    """Four warps: the codes of each step, from the tile's last one on, to keys and values."""
    k_ptr, v_ptr, stride_kp, stride_kb, stride_kj, stride_vp, stride_vb, stride_vj = scales
    strides = (stride_kp, stride_kb, stride_vp, stride_vb)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = gl.arange(0, KEYS, layout)
    # as key_vector reads them
    place = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    tiles = 0
    n = 0
    while wait_tile(tile_ring, tiles):
        count = word_of_tile(tile_ring, tiles, COUNT)
        length = word_of_tile(tile_ring, tiles, LENGTH)
        first_row = word_of_tile(tile_ring, tiles, FIRST_ROW)
        kv_head = word_of_tile(tile_ring, tiles, KV_HEAD)
        part = word_of_tile(tile_ring, tiles, PART)
        request = word_of_tile(tile_ring, tiles, REQUEST)
        release(tile_ring, tiles, SLOTS)
        tile = (0, count, length, first_row, kv_head, part)
        begin, first, last = steps_of(tile, window, GROUP, WINDOWED, SPLIT)
        ends_within = (length < last * KEYS) & (length > (last - 1) * KEYS) & (length % B > 0)
        table = tables_ptr + request.to(gl.int64) * stride_table
        if not UNIFORM:
            # each key's scales a step ahead of their use, its page two steps
            heads = (k_ptr + kv_head * stride_kj, v_ptr + kv_head * stride_vj)
            seen = (begin, length)
            key = (last - 1) * KEYS + place
            page = _pages_of(table, key, seen, B)
            k_scale, v_scale = _scales_of(heads, strides, page, key, seen, B)
            key -= KEYS
            page = _pages_of(table, key, seen, B)
        for i in range(last - first):
            stage = n % STAGES
            codes = n * (2 * KEYS // PIECE)
            wait_empty(k_ring, n, STAGES)
            if not UNIFORM:
                v_scale = gl.where(v_scale < TINY, TINY, v_scale)
                vectors.index(stage * VECTORS).store(k_scale * scale)
                vectors.index(stage * VECTORS + 1).store(gl.log2(v_scale))
                vectors.index(stage * VECTORS + 2).store(1.0 / v_scale)
            _unpack(k_ring, n, codes_ring, codes, IS_INT)
            fence_async_shared()
            fill(k_ring, n, STAGES)

            if not UNIFORM:
                k_scale, v_scale = _scales_of(heads, strides, page, key, seen, B)
                key -= KEYS
                page = _pages_of(table, key, seen, B)

            wait_empty(v_ring, n, STAGES)
            _unpack(v_ring, n, codes_ring, codes + KEYS // PIECE, IS_INT)
            # an integer times a weight of zero is zero, whatever it is
            if not IS_INT and (i == 0) & ends_within:
                zero_tail(v_ring, n, length, B)
            fence_async_shared()
            fill(v_ring, n, STAGES)
            n += 1
        tiles += 1


@gluon.jit
def _pages_of(table, key, seen, B: gl.constexpr):
    exists = (key >= seen[0]) & (key < seen[1])
    return gl.load(table + key // B, mask=exists, other=0).to(gl.int64)


@gluon.jit
def _scales_of(heads, strides, page, key, seen, B: gl.constexpr):
    """Scales of keys and of values; what is not to be read, which may be NaN, becomes 0 and 1."""
    exists = (key >= seen[0]) & (key < seen[1])
    k_rows = page * strides[0] + key % B * strides[1]
    v_rows = page * strides[2] + key % B * strides[3]
    k_scale = gl.load(heads[0] + k_rows, mask=exists, other=0.0)
    return k_scale, gl.load(heads[1] + v_rows, mask=exists, other=1.0)


@gluon.jit
def _unpack(ring, n, codes_ring, first_slot, IS_INT: gl.constexpr):
    """One step's codes, in the slots from `first_slot` on, to stage n of a ring."""
    # eight lanes read eight rows, whose swizzled 16 bytes lie in different banks, and so they write
    layout: gl.constexpr = gl.BlockedLayout([1, BYTES], [8, 4], [4, 1], [0, 1])
    to_half: gl.constexpr = INT_TO_HALF if IS_INT else FLOAT8_TO_HALF
    for piece in gl.static_range(KEYS // PIECE):
        slot = first_slot + piece
        wait_full(codes_ring, slot, CODE_SLOTS)
        codes = codes_ring[0].index(slot % CODE_SLOTS).load(layout)
        numbers = gl.inline_asm_elementwise(
            to_half, "=&r,=&r,r", [codes], dtype=gl.float16, is_pure=True, pack=4
        )
        ring[0].index(n % STAGES).slice(piece * PIECE, PIECE).store(numbers)
        release(codes_ring, slot, CODE_SLOTS)


# A lane of the scores' layout has two columns of each eight; those of sixteen keys lie side by
# side in memory, so that it reads them at once.
_PLACES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [16], [32], [64]],
        lane_bases=[[4], [8], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[128],
    )
)


@gluon.jit
def key_vector(vectors, n, which: gl.constexpr, layout: gl.constexpr):
    """One of the VECTORS of step n, by columns of `layout`."""
    places = vectors.index(n % STAGES * VECTORS + which).load(_PLACES)
    keys = places.reshape([KEYS // 16, 4, 2, 2]).permute([0, 2, 1, 3]).reshape([KEYS])
    return gl.convert_layout(keys, gl.SliceLayout(0, layout))
