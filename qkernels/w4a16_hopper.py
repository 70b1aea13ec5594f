"""The Hopper body of W4A16 for many rows, in Gluon: y^T = W x^T on wgmma. Knows no file format.

Eight warps make one tile of 128 outputs by 256 rows after another. A thread loads its own words of
the weight, then unpacks and scales them in registers, where the tensor core reads them; x comes
through the copy engine. The next slice is unpacked while the product of this one runs, and the
next tile's first words and rows are under way while this tile is stored. A weight is rounded once,
to the bits of PackedWeight.dequantize.

Legend: M rows of x, K inputs, N outputs, G groups; BM, BN, BK the tile and step, SK one slice of a
step.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from qkernels.gluon_names import barrier, descriptor, load_box, store_box
from qkernels.launch import on_device
from qkernels.prepared import PreparedWeight
from qkernels.tiles import LINEAR_MAX_BLOCK_K, LINEAR_TILE_N, LinearHopperTile

SLICE = 64  # inputs of one copy of x, and of one product: 128 bytes, the widest swizzle


def linear(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    tile: LinearHopperTile,
    *,
    magic_word: int,
    offset: int,
) -> torch.Tensor:
    """x [M, K], contiguous, at an address divisible by 16, to [M, N]. For groups of 128 n.

    `magic_word` and `offset`: what w4a16.py ors codes into, and what it subtracts where symmetric.
    """
    M, K = x_MK.shape
    N = weight.out_features
    y_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    with on_device(x_MK):
        _w4a16_hopper[(tile.blocks,)](
            descriptor(x_MK, [tile.block_m, SLICE]),
            weight.tensors["words"],
            weight.tensors["scales"],
            weight.tensors.get("offsets"),
            bias,
            descriptor(y_MN, [tile.block_m, tile.block_n]),
            M,
            N,
            K,
            STEPS_OF_GROUP=weight.spec.group_length(K) // LINEAR_MAX_BLOCK_K,
            MAGIC=magic_word,
            OFFSET=_word_of_two(offset, x_MK.dtype),
            BM=tile.block_m,
            BK=LINEAR_MAX_BLOCK_K,
            SK=SLICE,
            TILE_N=LINEAR_TILE_N,
            STAGES=tile.stages,
            num_warps=tile.block_n // 16,
        )
    return y_MN


@functools.cache
def _word_of_two(value: int, dtype: torch.dtype) -> int:
    """The bits of `value` as a 16-bit number, in both halves of a word."""
    bits = torch.tensor(value, dtype=dtype, device="cpu").view(torch.int16).item()
    return (bits & 0xFFFF) * 0x10001


@gluon.constexpr_function
def _words_layout(ROWS, C):
    """Of words [ROWS, 4 C]: a thread holds word t = lane % 4 of rows lane // 4 and 8 below it."""
    columns = [[0, 1 << i] for i in range(C.bit_length() - 1)]
    warps = [[16 << i, 0] for i in range((ROWS // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*columns, [8, 0]],
        lane_bases=[[0, C], [0, 2 * C], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[ROWS, 4 * C],
    )


@gluon.jit
def _weights(words, magic, offset, high, low, DTYPE: gl.constexpr):
    """The codes at bits 0 and 16 of each word, as (code - offset) (high + low) rounded once.

    code - offset is exact, and in bfloat16 so is its product with `low`: the three bits of a
    float16 scale that `high` has no room for.
    """
    if DTYPE.is_fp16():
        return gl.inline_asm_elementwise(
            "{ .reg .b32 c; lop3.b32 c, $1, 0x000F000F, $2, 0xEA; sub.f16x2 c, c, $3;"
            " mul.f16x2 $0, c, $4; }",
            "=r,r,r,r,r",
            [words, magic, offset, high],
            gl.int32,
            True,
            1,
        )
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 c, l; lop3.b32 c, $1, 0x000F000F, $2, 0xEA; sub.bf16x2 c, c, $3;"
            " mul.bf16x2 l, c, $5; fma.rn.bf16x2 $0, c, $4, l; }",
            "=r,r,r,r,r,r",
            [words, magic, offset, high, low],
            gl.int32,
            True,
            1,
        )


@gluon.jit
def _halves(words, DTYPE: gl.constexpr):
    """Both 16-bit halves of each word as numbers: [..., 2]."""
    low = (words & 0xFFFF).to(gl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _twice(values):
    """16-bit numbers [ROWS] into both halves of words [ROWS, 1]."""
    bits = values.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return (bits | (bits << 16))[:, None]


@gluon.jit
def _unpack(words, offset, high, low, MAGIC: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """Words [ROWS, 4 C] of a slice to the tensor core's left operand. Moves nothing."""
    ROWS: gl.constexpr = words.shape[0]
    C: gl.constexpr = words.shape[1] // 4
    magic = gl.full(words.shape, MAGIC, gl.int32, words.type.layout)
    p0 = _weights(words, magic, offset, high, low, DTYPE)
    p1 = _weights(words >> 4, magic, offset, high, low, DTYPE)
    p2 = _weights(words >> 8, magic, offset, high, low, DTYPE)
    p3 = _weights(words >> 12, magic, offset, high, low, DTYPE)
    i0 = gl.join(_halves(p0, DTYPE), _halves(p1, DTYPE))
    i1 = gl.join(_halves(p2, DTYPE), _halves(p3, DTYPE))
    # [ROWS, t, c, e, h, i] -> [ROWS, c, i, h, t, e]
    values = gl.join(i0, i1).reshape([ROWS, 4, C, 2, 2, 2]).permute([0, 2, 5, 4, 1, 3])
    return gl.convert_layout(values.reshape([ROWS, 32 * C]), LEFT, assert_trivial=True)


@gluon.jit
def _slices(words):
    """Words [ROWS, 4 C] of a step, cut along the inputs into two [ROWS, 2 C]."""
    ROWS: gl.constexpr = words.shape[0]
    C: gl.constexpr = words.shape[1] // 8
    LAYOUT: gl.constexpr = _words_layout(ROWS, C)
    w0, w1 = gl.split(words.reshape([ROWS, 4, 2, C]).permute([0, 1, 3, 2]))
    w0 = gl.convert_layout(w0.reshape([ROWS, 4 * C]), LAYOUT, assert_trivial=True)
    w1 = gl.convert_layout(w1.reshape([ROWS, 4 * C]), LAYOUT, assert_trivial=True)
    return w0, w1


@gluon.jit(do_not_specialize=["M"])
def _w4a16_hopper(
    x_desc,  # of x [M, K], blocks [BM, SK]
    words_ptr,  # [N/64, K/BK, 64, 4, C]
    scales_ptr,  # [N/64, G, 64]
    offsets_ptr,  # [N/64, G, 64] or None
    bias_ptr,  # [N] or None
    y_desc,  # of y [M, N], blocks [BM, BN]
    M,
    N,
    K,
    STEPS_OF_GROUP: gl.constexpr,
    MAGIC: gl.constexpr,
    OFFSET: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    SK: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    DTYPE: gl.constexpr = y_desc.dtype
    BN: gl.constexpr = 16 * gl.num_warps()
    C: gl.constexpr = BK // 32  # words of a row, a step and one t
    # one product in flight reads the registers of one slice; the other slice is unpacked meanwhile
    gl.static_assert(BK == 2 * SK)
    SLICE_BYTES: gl.constexpr = BM * SK * DTYPE.primitive_bitwidth // 8
    TILE_WORDS: gl.constexpr = TILE_N * 4 * C
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    WORDS: gl.constexpr = _words_layout(BN, C)
    WORDS_OF_SLICE: gl.constexpr = _words_layout(BN, C // 2)
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, BM, SK], x_desc.layout)
    ys = gl.allocate_shared_memory(DTYPE, [BM, BN], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()

    # Tiles of one block follow each other along the outputs: blocks that work at the same outputs
    # then do so at the same time, and read their words from memory once.
    steps = K // BK
    groups = steps // STEPS_OF_GROUP
    stored_tiles = gl.cdiv(N, TILE_N)
    tiles_n = gl.cdiv(N, BN)
    tiles = tiles_n * gl.cdiv(M, BM)
    first_tile = gl.program_id(0) * tiles // gl.num_programs(0)
    end_tile = (gl.program_id(0) + 1) * tiles // gl.num_programs(0)

    # x runs ahead of the products by STAGES - 1 slices, over the ends of tiles
    ahead_tile = first_tile
    ahead_m = ahead_tile // tiles_n * BM
    ahead_k = 0
    for i in gl.static_range(STAGES - 1):
        inside = ahead_tile < end_tile
        mbarrier.expect(full.index(i), SLICE_BYTES, pred=inside)
        load_box(x_desc, [ahead_m, ahead_k], full.index(i), xs.index(i), pred=inside)
        ahead_k += SK
        if ahead_k == K:
            ahead_tile += 1
            ahead_m = ahead_tile // tiles_n * BM
            ahead_k = 0

    # a thread's words, scales and offsets inside the stored tiles of 64 outputs
    row = gl.arange(0, BN, gl.SliceLayout(1, WORDS))
    column = gl.arange(0, 4 * C, gl.SliceLayout(0, WORDS))
    word = (row % TILE_N)[:, None] * (4 * C) + column[None, :]
    scale_row = gl.arange(0, BN, gl.SliceLayout(1, WORDS_OF_SLICE))
    symmetric = gl.full([BN, 2 * C], OFFSET, gl.int32, WORDS_OF_SLICE)
    # beyond the last stored tile: the last, whose results go nowhere
    stored = first_tile % tiles_n * (BN // TILE_N)
    word_tile = gl.minimum(stored + row // TILE_N, stored_tiles - 1)
    words_ptrs = words_ptr + (word_tile * steps * TILE_WORDS)[:, None] + word
    scale_tile = gl.minimum(stored + scale_row // TILE_N, stored_tiles - 1)
    group_rows = scale_tile * groups * TILE_N + scale_row % TILE_N
    group = group_rows
    words = gl.load(words_ptrs)
    scale = gl.load(scales_ptr + group)
    if offsets_ptr is not None:
        offset = gl.load(offsets_ptr + group)
    slice = 0
    for tile in range(first_tile, end_tile):
        tile_n = tile % tiles_n
        # after the last tile: words that nobody uses
        following = gl.minimum(tile + 1, tiles - 1) % tiles_n * (BN // TILE_N)
        total = warpgroup_mma_init(gl.zeros([BN, BM], gl.float32, PRODUCT))
        for step in range(steps):
            pieces = _slices(words)
            exact = scale.to(gl.float32)
            rounded = exact.to(DTYPE)
            high = _twice(rounded)
            low = _twice((exact - rounded.to(gl.float32)).to(DTYPE))
            this_offset = symmetric
            if offsets_ptr is not None:
                this_offset = _twice(offset).broadcast_to([BN, 2 * C])
            # the next step's words, a whole step before they are needed
            if step + 1 < steps:
                words_ptrs += TILE_WORDS
                group = group_rows + (step + 1) // STEPS_OF_GROUP * TILE_N
            else:
                word_tile = gl.minimum(following + row // TILE_N, stored_tiles - 1)
                words_ptrs = words_ptr + (word_tile * steps * TILE_WORDS)[:, None] + word
                scale_tile = gl.minimum(following + scale_row // TILE_N, stored_tiles - 1)
                group_rows = scale_tile * groups * TILE_N + scale_row % TILE_N
                group = group_rows
            words = gl.load(words_ptrs)
            scale = gl.load(scales_ptr + group)
            if offsets_ptr is not None:
                offset = gl.load(offsets_ptr + group)
            for i in gl.static_range(2):
                left = _unpack(pieces[i], this_offset, high, low, MAGIC, DTYPE, LEFT)
                place = slice % STAGES
                mbarrier.wait(full.index(place), slice // STAGES & 1)
                x = xs.index(place).permute([1, 0])  # [SK, BM]
                total = warpgroup_mma(left, x, total, is_async=True)
                total = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[total]))
                # all warps have multiplied the slice before this one: its place is free
                barrier()
                place = (slice + STAGES - 1) % STAGES
                inside = ahead_tile < end_tile
                mbarrier.expect(full.index(place), SLICE_BYTES, pred=inside)
                load_box(
                    x_desc, [ahead_m, ahead_k], full.index(place), xs.index(place), pred=inside
                )
                ahead_k += SK
                if ahead_k == K:
                    ahead_tile += 1
                    ahead_m = ahead_tile // tiles_n * BM
                    ahead_k = 0
                slice += 1
        sums = warpgroup_mma_wait(0, deps=[total])
        if bias_ptr is not None:
            n = tile_n * BN + gl.arange(0, BN, gl.SliceLayout(1, PRODUCT))
            sums += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        # the copy of the tile before has read its values
        tma.store_wait(0)
        barrier()
        ys.store(sums.to(DTYPE).permute([1, 0]))
        fence_async_shared()
        barrier()
        store_box(y_desc, [tile // tiles_n * BM, tile_n * BN], ys)
    tma.store_wait(0)
