"""The Hopper body of W4A16 for many rows, in Gluon: y^T = W x^T on wgmma. Knows no file format.

A block keeps its place on an SM. One of its warps does nothing but start copies, of x and of the
weight's words, as many steps ahead as shared memory holds. Two or three warpgroups multiply, each
its own 64 outputs, on their own clocks: each unpacks and scales its words in registers, where the
tensor core reads them. Where tiles are fewer than SMs, parts of K go to different blocks.

Legend: M rows of x, K inputs, N outputs, G groups; BM rows of a tile; a step is 128 inputs.
"""

import functools
from dataclasses import dataclass

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

from qkernels.gluon_launch import wait_for_kernel_before
from qkernels.gluon_meet import meet
from qkernels.gluon_names import descriptor
from qkernels.launch import launch, on_device, sm_count, workspace
from qkernels.prepared import PreparedWeight
from qkernels.tiles import LINEAR_MAX_BLOCK_K, LINEAR_TILE_N
from qkernels.w4a16_hopper_copy import copy, ends, unit_of_work
from qkernels.w4a16_hopper_store import store
from qkernels.w4a16_hopper_tiles import LinearHopperTile
from qkernels.w4a16_hopper_unpack import factors, load_pieces, unpack, words_layout

SLICE = 64  # inputs of one copy of x: 128 bytes, the widest swizzle
WORDS_BOX = [32, 32]  # a stored tile's 1024 words, in rows of 128 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What the kernel takes of a weight's numerics as constants."""

    steps_of_group: int
    magic: int  # a word: what codes are or-ed into
    offset: int  # a word: what is subtracted where symmetric
    has_offsets: bool
    has_bias: bool


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
    partials, counters = workspace(x_MK.device)
    tiles = tile.tiles(M, N)
    scales, offsets = weight.tensors["scales"], weight.tensors.get("offsets")
    format = Format(
        steps_of_group=weight.spec.group_length(K) // LINEAR_MAX_BLOCK_K,
        magic=magic_word,
        offset=_word_of_two(offset, x_MK.dtype),
        has_offsets=offsets is not None,
        has_bias=bias is not None,
    )
    # parts of a tile wait for each other: all must run at once
    assert tile.split == 1 or (tile.fits(M, N, K) and tile.blocks == tiles * tile.split), tile
    assert tile.blocks <= sm_count(x_MK.device), tile
    with on_device(x_MK):
        launch(
            _w4a16_hopper,
            (tile.blocks,),
            descriptor(x_MK, [tile.block_m, SLICE]),
            descriptor(x_MK, [tile.block_m // 2, SLICE]),
            descriptor(weight.tensors["words"].view(-1, WORDS_BOX[1]), WORDS_BOX),
            scales,
            scales if offsets is None else offsets,
            scales if bias is None else bias,
            descriptor(y_MN, [tile.store_rows, LINEAR_TILE_N]),
            partials,
            counters,
            M,
            N,
            K,
            tiles // tile.blocks * tile.blocks if tile.halves else tiles,
            TILE=tile,
            FORMAT=format,
            num_warps=4,
            maxnreg=tile.registers,
            launch_pdl=True,
        )
    return y_MN


@functools.cache
def _word_of_two(value: int, dtype: torch.dtype) -> int:
    """The bits of `value` as a 16-bit number, in both halves of a word."""
    bits = torch.tensor(value, dtype=dtype, device="cpu").view(torch.int16).item()
    return (bits & 0xFFFF) * 0x10001


@gluon.jit
def _load_scales(pointers, ptr_rows, step, FORMAT: gl.constexpr):
    """A step's scales and offsets [64], as they are in memory."""
    scales_ptr, offsets_ptr, _, _, _ = pointers
    group = ptr_rows + step // FORMAT.steps_of_group * 64
    scale = gl.load(scales_ptr + group)
    if FORMAT.has_offsets:
        return scale, gl.load(offsets_ptr + group)
    else:
        return scale, scale


@gluon.jit
def _free(empty, stage, pred, STAGES: gl.constexpr):
    """Tell the copying warp that this warpgroup has read the stage before `stage`."""
    if STAGES & (STAGES - 1) == 0:
        before = (stage + STAGES - 1) & (STAGES - 1)
    else:
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
    mbarrier.arrive(empty.index(before), count=1, pred=pred)


@gluon.jit
def _sums(
    rings,
    pointers,
    ptr_rows,
    begin,
    end,
    stage,
    phase,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    BM: gl.constexpr,
    FORMAT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """This warpgroup's 64 outputs by BM rows, over some steps; and the next stage and its phase.

    A product goes on reading its left registers after it was issued. It is waited for when the
    next one was issued, which has registers of its own: a step has an even number of them.
    """
    xs, words, _, full, empty = rings
    PARTS: gl.constexpr = TILE.parts
    STAGES: gl.constexpr = TILE.stages
    PIECE: gl.constexpr = TILE.piece
    PIECES: gl.constexpr = 128 // PIECE
    AHEAD: gl.constexpr = TILE.ahead
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    scale, offset = _load_scales(pointers, ptr_rows, begin, FORMAT)
    sums = gl.zeros([64, BM], gl.float32, LAYOUT)
    for step in range(begin, end):
        less, high, low = factors(scale, offset, PIECE, FORMAT.offset, FORMAT.has_offsets, DTYPE)
        # the next step's, which the copying warp has asked for; after the last: any
        following = gl.minimum(step + 1, end - 1)
        scale, offset = _load_scales(pointers, ptr_rows, following, FORMAT)
        mbarrier.wait(full.index(stage), phase)
        pieces = load_pieces(words.index(stage * PARTS + WHICH), PIECE)
        for i in gl.static_range(PIECES):
            left = unpack(pieces[i], less, high, low, FORMAT.magic, DTYPE, LEFT)
            x = xs.index(2 * stage + i * PIECE // 64).slice(0, BM, dim=0)
            if PIECE == 32:
                x = x.slice(i % 2 * 32, 32, dim=1)
            sums = warpgroup_mma(left, x.permute([1, 0]), sums, is_async=True)
            sums = warpgroup_mma_wait(1 if AHEAD or i < PIECES - 1 else 0, deps=[sums])
            if AHEAD and i == 0:
                _free(empty, stage, step > begin, STAGES)
        if not AHEAD:
            mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    if AHEAD:
        _free(empty, stage, True, STAGES)
    return sums, stage, phase


@gluon.jit
def _multiply_units(
    descs,
    rings,
    pointers,
    sizes,
    first,
    end_unit,
    stage,
    phase,
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
    rows = gl.arange(0, 64, gl.SliceLayout(1, words_layout(TILE.piece // 32)))
    for unit in range(first, end_unit, gl.num_programs(0)):
        tile, part, tile_n, m, begin, end = unit_of_work(unit, sizes, TILE, HALF)
        stored = gl.minimum(tile_n * PARTS + WHICH, stored_tiles - 1)
        ptr_rows = stored * (steps // FORMAT.steps_of_group) * 64 + rows
        sums, stage, phase = _sums(
            rings,
            pointers,
            ptr_rows,
            begin,
            end,
            stage,
            phase,
            WHICH,
            TILE,
            BM,
            FORMAT,
            DTYPE,
        )
        if SPLIT > 1:
            sums = meet(sums, tile * PARTS + WHICH, part, partials_ptr, counters_ptr, SPLIT)
            m += part * (BM // SPLIT)
        n = (tile_n * PARTS + WHICH) * 64
        store(sums, bias_ptr, y, y_bufs.index(WHICH), m, n, N, FORMAT.has_bias)
    return stage, phase


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
    wait_for_kernel_before()
    stage, phase = _multiply_units(
        descs,
        rings,
        pointers,
        sizes,
        first,
        whole_end,
        zero,
        zero,
        WHICH,
        TILE,
        False,
        FORMAT,
    )
    if TILE.halves:
        _multiply_units(
            descs,
            rings,
            pointers,
            sizes,
            whole_end + first,
            all_end,
            stage,
            phase,
            WHICH,
            TILE,
            True,
            FORMAT,
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "whole"])
def _w4a16_hopper(
    x_desc,  # of x [M, K], blocks [BM, 64]
    half_desc,  # the same, blocks [BM / 2, 64]
    words_desc,  # of the words [N/64 K/128 32, 32]
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
    TILE: gl.constexpr,  # a LinearHopperTile
    FORMAT: gl.constexpr,  # a Format
):
    DTYPE: gl.constexpr = y_desc.dtype
    PARTS: gl.constexpr = TILE.parts
    BM: gl.constexpr = TILE.block_m
    STAGES: gl.constexpr = TILE.stages
    xs = gl.allocate_shared_memory(DTYPE, [2 * STAGES, BM, 64], x_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES * PARTS, 32, 32], words_desc.layout)
    y_bufs = gl.allocate_shared_memory(DTYPE, [PARTS, TILE.store_rows, 64], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
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
