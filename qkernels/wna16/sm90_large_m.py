"""The Hopper body of W4A16 and W8A16 for many rows, in Gluon: y^T = W x^T on wgmma.

Knows no file format. A block keeps its place on an SM. One of its warps does nothing but start
copies, of x and of the weight's words, as many ahead as shared memory holds. Two or three
warpgroups multiply, each its own 64 outputs, on their own clocks: each unpacks and scales its words
in registers, where the tensor core reads them. Where tiles are fewer than SMs, parts of K go to
different blocks.

Legend: M rows of x, K inputs, N outputs, G groups; BM rows of a tile; a step is 128 inputs.
"""

import functools
from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import descriptor
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait
from qkernels.gpu.pipeline import advance, after, new_barriers
from qkernels.gpu.split_k_reduce import reduce_scatter
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16.dequant import factors, in_full, load_pieces, rows_layout, unpack
from qkernels.wna16.layout import TILE_N
from qkernels.wna16.numerics import weight_numerics
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.sm90_large_m_epilogue import store
from qkernels.wna16.sm90_large_m_load import copy, ends, unit_of_work

SLICE = 64  # inputs of one copy of x: 128 bytes, the widest swizzle


def words_box(bits: int) -> list[int]:
    """A stored tile's words of 128 inputs, in rows of 128 bytes."""
    return [8 * bits, 32]


def linear(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    tile: LargeMConfig,
    *,
    offset: int,
) -> torch.Tensor:
    """x [M, K], contiguous, at an address divisible by 16, to [M, N]. For groups of 128 n.

    `offset`: what gemm.py subtracts where symmetric.
    """
    M, K = x_MK.shape
    N = weight.out_features
    y_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    partials, counters = workspace(x_MK.device)
    tiles = tile.tiles(M, N)
    scales, offsets = weight.tensors["scales"], weight.tensors.get("offsets")
    box = words_box(weight.spec.bits)
    format = weight_numerics(weight, bias, offset)
    # parts of a tile wait for each other: all must run at once
    assert tile.split == 1 or (tile.fits(M, N, K) and tile.blocks == tiles * tile.split), tile
    assert tile.blocks <= sm_count(x_MK.device), tile
    assert tile.bits == format.bits, "a tile of the other bits holds more or fewer stages"
    with on_device(x_MK):
        launch(
            _w4a16_hopper,
            (tile.blocks,),
            descriptor(x_MK, [tile.block_m, SLICE]),
            descriptor(x_MK, [tile.block_m // 2, SLICE]),
            descriptor(weight.tensors["words"].view(-1, box[1]), box),
            scales,
            scales if offsets is None else offsets,
            scales if bias is None else bias,
            descriptor(y_MN, [tile.store_rows, TILE_N]),
            partials,
            counters,
            M,
            N,
            K,
            tiles // tile.blocks * tile.blocks if tile.halves else tiles,
            TILE=_compiled_in(tile),
            FORMAT=format,
            num_warps=4,
            maxnreg=tile.registers,
            launch_pdl=True,
        )
    return y_MN


@functools.cache
def _compiled_in(tile: LargeMConfig) -> LargeMConfig:
    """The tile without its grid: one kernel does any number of tiles."""
    return replace(tile, blocks=0)


@gluon.jit
def _load_scales(pointers, ptr_rows, step, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """A step's scales and offsets [64], as they are in memory."""
    scales_ptr, offsets_ptr, _, _, _ = pointers
    group = ptr_rows + step // FORMAT.steps_of_group * 64
    scale = gl.load(scales_ptr + group)
    if FORMAT.has_offsets:
        return scale, gl.load(offsets_ptr + group)
    else:
        return scale, gl.full([64], FORMAT.offset, DTYPE, group.type.layout)


@gluon.jit
def _free(empty, stage, pred, STAGES: gl.constexpr):
    """Tell the copying warp that this warpgroup has read the stage before `stage`."""
    before = gl.where(stage == 0, STAGES - 1, stage - 1)
    mbarrier.arrive(empty.index(before), count=1, pred=pred)


@gluon.jit
def _sums(
    rings,
    pointers,
    ptr_rows,
    begin,
    end,
    at,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    BM: gl.constexpr,
    FORMAT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """This warpgroup's 64 outputs by BM rows, over some steps; and where the rings then are.

    A product goes on reading its left registers after it was issued. It is waited for when the
    next ones were issued, which have registers of their own: a step has an even number of products.
    """
    xs, words, _, full, empty = rings
    PARTS: gl.constexpr = TILE.parts
    STAGES: gl.constexpr = TILE.stages
    STAGES_OF_STEP: gl.constexpr = TILE.stages_of_step
    BOXES: gl.constexpr = 2 // STAGES_OF_STEP
    PIECE: gl.constexpr = TILE.piece
    PIECES: gl.constexpr = 128 // PIECE
    OF_NEXT_STAGE: gl.constexpr = PIECES // STAGES_OF_STEP  # the first piece that is
    AHEAD: gl.constexpr = TILE.ahead
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    stage, phase, place = at
    scale, offset = _load_scales(pointers, ptr_rows, begin, FORMAT, DTYPE)
    sums = gl.zeros([64, BM], gl.float32, LAYOUT)
    for step in range(begin, end):
        of_rows = factors(scale, offset, FORMAT, DTYPE)
        # the next step's, which the copying warp has asked for; after the last: any
        next_step = gl.minimum(step + 1, end - 1)
        scale, offset = _load_scales(pointers, ptr_rows, next_step, FORMAT, DTYPE)
        mbarrier.wait(full.index(stage), phase)
        pieces = load_pieces(words.index(place * PARTS + WHICH), PIECE, FORMAT.bits)
        for i in gl.static_range(PIECES):
            left = unpack(pieces[i], of_rows, FORMAT, DTYPE, LEFT)
            if i == OF_NEXT_STAGE:
                stage, phase = advance(stage, phase, STAGES)
                mbarrier.wait(full.index(stage), phase)
            x = xs.index(BOXES * stage + i * PIECE // 64 % BOXES).slice(0, BM, dim=0)
            if PIECE < 64:
                x = x.slice(i * PIECE % 64, PIECE, dim=1)
            sums = warpgroup_mma(left, x.permute([1, 0]), sums, is_async=True)
            # the product before this one is over
            sums = warpgroup_mma_wait(TILE.pending, deps=[sums])
            if i == OF_NEXT_STAGE + TILE.pending - 1:
                _free(empty, stage, True, STAGES)
            elif AHEAD and i == TILE.pending - 1:
                _free(empty, stage, step > begin, STAGES)
        if not AHEAD:
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        place = after(place, TILE.words_slots)
    if AHEAD:
        sums = warpgroup_mma_wait(0, deps=[sums])
        _free(empty, stage, True, STAGES)
    return sums, (stage, phase, place)


@gluon.jit
def _multiply_units(
    descs,
    rings,
    pointers,
    sizes,
    first,
    end_unit,
    at,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    HALF: gl.constexpr,
    FORMAT: gl.constexpr,
):
    _, _, _, y = descs
    _, _, y_bufs, _, _ = rings
    _, _, bias_ptr, partials_ptr, counters_ptr = pointers
    N, _, _, steps, stored_tiles, _ = sizes
    DTYPE: gl.constexpr = y.dtype
    PARTS: gl.constexpr = TILE.parts
    SPLIT: gl.constexpr = TILE.split
    BM: gl.constexpr = TILE.block_m // 2 if HALF else TILE.block_m
    rows = gl.arange(0, 64, rows_layout(TILE.piece, FORMAT.bits))
    for unit in range(first, end_unit, gl.num_programs(0)):
        tile, part, tile_n, m, begin, end = unit_of_work(unit, sizes, TILE, HALF)
        stored = gl.minimum(tile_n * PARTS + WHICH, stored_tiles - 1)
        ptr_rows = stored * (steps // FORMAT.steps_of_group) * 64 + rows
        sums, at = _sums(rings, pointers, ptr_rows, begin, end, at, WHICH, TILE, BM, FORMAT, DTYPE)
        if SPLIT > 1:
            sums = reduce_scatter(
                sums, tile * PARTS + WHICH, part, partials_ptr, counters_ptr, SPLIT
            )
            m += part * (BM // SPLIT)
        n = (tile_n * PARTS + WHICH) * 64
        sums = in_full(sums, FORMAT, DTYPE)
        store(sums, bias_ptr, y, y_bufs, WHICH, m, n, N, FORMAT.has_bias, TILE.store_buffers)
    return at


@gluon.jit
def _multiply(
    descs,
    rings,
    pointers,
    sizes,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """One warpgroup: the products of its 64 outputs of each tile, and their results."""
    whole_end, all_end = ends(sizes, TILE)
    first = gl.program_id(0)
    zero = first * 0
    at = (zero, zero, zero)
    griddepcontrol_wait()
    at = _multiply_units(
        descs, rings, pointers, sizes, first, whole_end, at, WHICH, TILE, False, FORMAT
    )
    if TILE.halves:
        first += whole_end
        _multiply_units(
            descs, rings, pointers, sizes, first, all_end, at, WHICH, TILE, True, FORMAT
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "whole"])
def _w4a16_hopper(
    x_desc,  # of x [M, K], blocks [BM, 64]
    half_desc,  # the same, blocks [BM / 2, 64]
    words_desc,  # of the words [N/64 K/128 8 BITS, 32]
    scales_ptr,  # [N/64, G, 64]
    offsets_ptr,  # [N/64, G, 64], read if has_offsets
    bias_ptr,  # [N], read if has_bias
    y_desc,  # of y [M, N], blocks [rows, 64]
    partials_ptr,  # sums of parts of K
    counters_ptr,  # zero, one for each warpgroup's share of a tile
    M,
    N,
    K,
    whole,  # tiles that are not cut in halves
    TILE: gl.constexpr,  # a LargeMConfig
    FORMAT: gl.constexpr,  # a WeightNumerics
):
    DTYPE: gl.constexpr = y_desc.dtype
    PARTS: gl.constexpr = TILE.parts
    BM: gl.constexpr = TILE.block_m
    STAGES: gl.constexpr = TILE.stages
    BOXES: gl.constexpr = STAGES * 2 // TILE.stages_of_step
    WORDS: gl.constexpr = TILE.words_slots * PARTS
    STORES: gl.constexpr = TILE.store_buffers * PARTS
    xs = gl.allocate_shared_memory(DTYPE, [BOXES, BM, 64], x_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [WORDS, 8 * FORMAT.bits, 32], words_desc.layout)
    y_bufs = gl.allocate_shared_memory(DTYPE, [STORES, TILE.store_rows, 64], y_desc.layout)
    full, empty = new_barriers(STAGES, READERS=PARTS)
    fence_async_shared()
    descs = (x_desc, half_desc, words_desc, y_desc)
    rings = (xs, words, y_bufs, full, empty)
    pointers = (scales_ptr, offsets_ptr, bias_ptr, partials_ptr, counters_ptr)
    sizes = (N, gl.cdiv(N, PARTS * 64), gl.cdiv(M, BM), K // 128, gl.cdiv(N, 64), whole)
    MULTIPLY: gl.constexpr = TILE.multiply_registers
    COPY: gl.constexpr = TILE.copy_registers
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_multiply, (descs, rings, pointers, sizes, 0, TILE, FORMAT)),
                (_multiply, (descs, rings, pointers, sizes, 1, TILE, FORMAT)),
                (copy, (descs, rings, pointers, sizes, TILE, FORMAT)),
            ],
            [4, 1],
            [MULTIPLY, COPY],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (descs, rings, pointers, sizes, 0, TILE, FORMAT)),
                (_multiply, (descs, rings, pointers, sizes, 1, TILE, FORMAT)),
                (_multiply, (descs, rings, pointers, sizes, 2, TILE, FORMAT)),
                (copy, (descs, rings, pointers, sizes, TILE, FORMAT)),
            ],
            [4, 4, 1],
            [MULTIPLY, MULTIPLY, COPY],
        )
