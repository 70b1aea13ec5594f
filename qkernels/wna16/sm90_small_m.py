"""W4A16 of up to 64 rows on sm_90, in Gluon: y^T = W x^T on wgmma. Knows no file format.

One warp copies words, scales and x of some steps ahead into a ring in shared memory. Two warpgroups
multiply 64 outputs each: codes less their zero, exact in 16 bits, from registers, x from shared
memory. The scale multiplies the sum of a step, which for few rows is cheaper than to scale each
weight, as sm90_large_m.py does.

Legend: M rows of x, R rows that a tile has place for; K inputs, N outputs, G groups; a step is 128
inputs, a tile 128 outputs; a unit is a part of a tile's steps.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import descriptor, tma_load
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import advance, new_barriers
from qkernels.gpu.split_k_reduce import reduce_in_last_arriver
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16.dequant import load_pieces, rows_layout
from qkernels.wna16.dequant_int4 import codes_in_full, exact_codes, zeros_to_subtract
from qkernels.wna16.layout import TILE_N
from qkernels.wna16.numerics import weight_numerics
from qkernels.wna16.sm90_small_m_config import SmallMConfig

SLICE = 64  # inputs of one copy of x: 128 bytes, the widest swizzle
WORDS_BOX = [32, 32]  # a stored tile's words of a step, in rows of 128 bytes
PARTS = gl.constexpr(2)  # warpgroups that multiply, 64 outputs of a tile each


def linear(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    tile: SmallMConfig,
    *,
    offset: int,
) -> torch.Tensor:
    """x [M, K], contiguous, at an address divisible by 16, to [M, N]. For groups of 128 n.

    `offset`: what gemm.py subtracts where symmetric.
    """
    y_MN = x_MK.new_empty(x_MK.shape[0], weight.out_features)
    _launch(x_MK, weight, bias, tile, y_MN, offset, unreduced=False)
    return y_MN


def linear_parts(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    tile: SmallMConfig,
    *,
    offset: int,
) -> torch.Tensor:
    """`linear` before its parts of K are added: float32 [split, M, N], to be added in order."""
    parts_SMN = torch.empty(
        (tile.split, x_MK.shape[0], weight.out_features), dtype=torch.float32, device=x_MK.device
    )
    _launch(x_MK, weight, bias, tile, parts_SMN, offset, unreduced=True)
    return parts_SMN


def _launch(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    tile: SmallMConfig,
    y: torch.Tensor,
    offset: int,
    unreduced: bool,
) -> None:
    M, K = x_MK.shape
    N = weight.out_features
    partials, counters = workspace(x_MK.device)
    scales, offsets = weight.tensors["scales"], weight.tensors.get("offsets")
    units = tile.tiles(N) * tile.split
    with on_device(x_MK):
        launch(
            _w4a16_ring,
            (min(units, tile.blocks_of_sm * sm_count(x_MK.device)),),
            descriptor(weight.tensors["words"].view(-1, WORDS_BOX[1]), WORDS_BOX),
            descriptor(x_MK, [tile.rows, SLICE]),
            descriptor(scales.view(-1), [TILE_N]),
            descriptor((scales if offsets is None else offsets).view(-1), [TILE_N]),
            scales if bias is None else bias,
            y,
            partials,
            counters,
            M,
            N,
            K // 128,
            tile.tiles(N),
            TILE=tile,
            FORMAT=weight_numerics(weight, bias, offset),
            UNREDUCED=unreduced,
            num_warps=4,
            maxnreg=tile.registers,
            launch_pdl=True,
        )


@gluon.jit
def _unit(unit, steps, SPLIT: gl.constexpr):
    """(tile, part of K, first step, end of steps)."""
    part = unit % SPLIT
    return unit // SPLIT, part, part * steps // SPLIT, (part + 1) * steps // SPLIT


@gluon.jit
def _product(
    rings, stage, WHICH: gl.constexpr, TILE: gl.constexpr, FORMAT: gl.constexpr, SUMS: gl.constexpr
):
    """Sums [64, R] of a step's codes less their zero, times x. On return they are on their way.

    A product goes on reading its left registers after it has been issued: each has its own.
    """
    words, xs, _, offsets, _, _ = rings
    DTYPE: gl.constexpr = xs.dtype
    R: gl.constexpr = TILE.rows
    PIECE: gl.constexpr = TILE.piece
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OUTPUTS: gl.constexpr = rows_layout(PIECE, 4)
    own = stage * PARTS + WHICH
    if FORMAT.has_offsets:
        offset = offsets.index(own).load(OUTPUTS)
    else:
        offset = gl.full([64], FORMAT.offset, DTYPE, OUTPUTS)
    less = zeros_to_subtract(offset, DTYPE)
    pieces = load_pieces(words.index(own), PIECE, 4)
    sums = gl.zeros([64, R], gl.float32, SUMS)
    for i in gl.static_range(128 // PIECE):
        left = gl.convert_layout(exact_codes(pieces[i], less, DTYPE), LEFT, assert_trivial=True)
        x = xs.index(2 * stage + i * PIECE // 64)
        if PIECE < 64:
            x = x.slice(i * PIECE % 64, PIECE, dim=1)
        sums = warpgroup_mma(left, x.permute([1, 0]), sums, use_acc=i > 0, is_async=True)
    return sums


@gluon.jit
def _multiply(
    rings,
    pointers,
    sizes,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
    UNREDUCED: gl.constexpr,
):
    """One warpgroup: its 64 outputs of each tile, and their results."""
    _, xs, scales, _, full, empty = rings
    _, _, steps, tiles = sizes
    R: gl.constexpr = TILE.rows
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    stage = gl.program_id(0) * 0  # not a constant, which could not change in a loop
    phase = stage
    for unit in range(gl.program_id(0), tiles * TILE.split, gl.num_programs(0)):
        tile, part, begin, end = _unit(unit, steps, TILE.split)
        sums = gl.zeros([64, R], gl.float32, SUMS)
        for _ in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            scale = scales.index(stage * PARTS + WHICH).load(gl.SliceLayout(1, SUMS))
            scale = codes_in_full(scale.to(gl.float32), xs.dtype)
            product = _product(rings, stage, WHICH, TILE, FORMAT, SUMS)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage), count=1)
            sums += product * scale[:, None]
            stage, phase = advance(stage, phase, TILE.stages)
        if FORMAT.has_bias:
            sums += _bias(pointers, sizes, tile * PARTS + WHICH, part, SUMS)[:, None]
        if UNREDUCED:
            _store_part(sums, pointers, sizes, tile * PARTS + WHICH, part)
        else:
            _finish(sums, pointers, sizes, tile * PARTS + WHICH, part, TILE)


@gluon.jit
def _bias(pointers, sizes, place, part, SUMS: gl.constexpr):
    """Of the 64 outputs of a place, in float32, for the first part; 0 for others."""
    bias_ptr, _, _, _ = pointers
    _, N, _, _ = sizes
    n = place * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    bias = gl.load(bias_ptr + gl.minimum(n, N - 1)).to(gl.float32)
    return gl.where(part == 0, bias, 0.0)


@gluon.jit
def _store_part(sums, pointers, sizes, place, part):
    """A warpgroup's sums [64, R] as they are: 8 outputs of a row, 32 bytes, at a time.

    Through shared memory it would be 16 bytes of a lane, and 0.1 to 1.3 us later.
    """
    _, y_ptr, _, _ = pointers
    M, N, _, _ = sizes
    SUMS: gl.constexpr = sums.type.layout
    n = place * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    m = gl.arange(0, sums.shape[1], gl.SliceLayout(0, SUMS))
    inside = (n < N)[:, None] & (m < M)[None, :]
    rows = (y_ptr + part * M * N) + n
    gl.store(rows[:, None] + (m * N)[None, :], sums, mask=inside)


@gluon.jit
def _finish(sums, pointers, sizes, place, part, TILE: gl.constexpr):
    """A warpgroup's sums [64, R] to y. Of parts of K, the last to come adds all in order."""
    _, y_ptr, partials_ptr, counters_ptr = pointers
    M, N, _, _ = sizes
    last = True
    if TILE.split > 1:
        sums, last = reduce_in_last_arriver(
            sums, place, part, partials_ptr, counters_ptr, TILE.split
        )
    if last:
        _store(sums.to(y_ptr.dtype.element_ty), y_ptr, place * 64, M, N)


@gluon.jit
def _store(values, y_ptr, first, M, N):
    """Values [64 outputs, R] to y, 8 or 16 bytes of a row at a time."""
    R: gl.constexpr = values.shape[1]
    S: gl.constexpr = 4 if R == 8 else 8
    ALONG_N: gl.constexpr = gl.BlockedLayout([S, 1], [64 // S, S // 2], [1, 4], [0, 1])
    values = gl.convert_layout(values, ALONG_N)
    n = first + gl.arange(0, 64, gl.SliceLayout(1, ALONG_N))
    m = gl.arange(0, R, gl.SliceLayout(0, ALONG_N))
    inside = (n < N)[:, None] & (m < M)[None, :]
    gl.store(y_ptr + m[None, :] * N + n[:, None], values, mask=inside)


@gluon.jit
def _copy_weight(
    descs, rings, sizes, tile, step, stage, pred, TILE: gl.constexpr, FORMAT: gl.constexpr
):
    """A step's words and scales into a stage, which is told to expect x, too."""
    words_desc, x_desc, scales_desc, offsets_desc = descs
    words, _, scales, offsets, full, _ = rings
    _, N, steps, _ = sizes
    OFFSETS: gl.constexpr = offsets_desc.block_type.nbytes if FORMAT.has_offsets else 0
    OF_PART: gl.constexpr = words_desc.block_type.nbytes + scales_desc.block_type.nbytes + OFFSETS
    bar = full.index(stage)
    mbarrier.expect(bar, PARTS * OF_PART + 2 * x_desc.block_type.nbytes, pred=pred)
    for i in gl.static_range(PARTS):
        # beyond the last stored tile: the last, whose results go nowhere
        stored = gl.minimum(tile * PARTS + i, (N + 63) // 64 - 1)
        at = stage * PARTS + i
        tma_load(words_desc, [(stored * steps + step) * 32, 0], bar, words.index(at), pred=pred)
        group = stored * (steps // FORMAT.steps_of_group) + step // FORMAT.steps_of_group
        tma_load(scales_desc, [group * 64], bar, scales.index(at), pred=pred)
        if FORMAT.has_offsets:
            tma_load(offsets_desc, [group * 64], bar, offsets.index(at), pred=pred)


@gluon.jit
def _copy(descs, rings, sizes, TILE: gl.constexpr, FORMAT: gl.constexpr):
    """The warp that starts all copies: wait for a stage to be free, fill it, tell `full`."""
    _, x_desc, _, _ = descs
    _, xs, _, _, full, empty = rings
    _, _, steps, tiles = sizes
    STAGES: gl.constexpr = TILE.stages
    stage = gl.program_id(0) * 0
    phase = stage + 1
    # weights never change: their share of the first stages needs no wait for the kernel before
    tile, _, begin, end = _unit(gl.program_id(0), steps, TILE.split)
    started = gl.minimum(end - begin, STAGES)
    for i in range(started):
        _copy_weight(descs, rings, sizes, tile, begin + i, i, True, TILE, FORMAT)
    if TILE.launch_early:
        launch_dependents()
    griddepcontrol_wait()
    count = stage
    for unit in range(gl.program_id(0), tiles * TILE.split, gl.num_programs(0)):
        tile, _, begin, end = _unit(unit, steps, TILE.split)
        for step in range(begin, end):
            mbarrier.wait(empty.index(stage), phase)
            _copy_weight(descs, rings, sizes, tile, step, stage, count >= started, TILE, FORMAT)
            for half in gl.static_range(2):
                place = [0, step * 128 + half * 64]
                tma_load(x_desc, place, full.index(stage), xs.index(2 * stage + half))
            count += 1
            stage, phase = advance(stage, phase, STAGES)
    if not TILE.launch_early:
        launch_dependents()


@gluon.jit(do_not_specialize=["M", "steps", "tiles"])
def _w4a16_ring(
    words_desc,  # of the words [N/64 K/128 32, 32]
    x_desc,  # of x [M, K], blocks [R, 64]
    scales_desc,  # [N/64 G 64]
    offsets_desc,  # [N/64 G 64], read if has_offsets
    bias_ptr,  # [N], read if has_bias
    y_ptr,  # [M, N]; of parts that stay apart float32 [split, M, N]
    partials_ptr,  # sums of parts of K
    counters_ptr,  # zero, one for each 64 outputs
    M,
    N,
    steps,
    tiles,
    TILE: gl.constexpr,  # a SmallMConfig
    FORMAT: gl.constexpr,  # a WeightNumerics
    UNREDUCED: gl.constexpr,  # parts of K are left to whoever reads y
):
    STAGES: gl.constexpr = TILE.stages
    R: gl.constexpr = TILE.rows
    words = gl.allocate_shared_memory(gl.int32, [STAGES * PARTS, 32, 32], words_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, R, 64], x_desc.layout)
    scales = gl.allocate_shared_memory(scales_desc.dtype, [STAGES * PARTS, 64], scales_desc.layout)
    if FORMAT.has_offsets:
        offsets = gl.allocate_shared_memory(
            offsets_desc.dtype, [STAGES * PARTS, 64], offsets_desc.layout
        )
    else:
        offsets = scales
    full, empty = new_barriers(STAGES, READERS=PARTS)
    fence_async_shared()
    descs = (words_desc, x_desc, scales_desc, offsets_desc)
    rings = (words, xs, scales, offsets, full, empty)
    pointers = (bias_ptr, y_ptr, partials_ptr, counters_ptr)
    sizes = (M, N, steps, tiles)
    MULTIPLY: gl.constexpr = TILE.multiply_registers
    COPY: gl.constexpr = TILE.copy_registers
    gl.warp_specialize(
        [
            (_multiply, (rings, pointers, sizes, 0, TILE, FORMAT, UNREDUCED)),
            (_multiply, (rings, pointers, sizes, 1, TILE, FORMAT, UNREDUCED)),
            (_copy, (descs, rings, sizes, TILE, FORMAT)),
        ],
        [4, 1],
        [MULTIPLY, COPY],
    )
