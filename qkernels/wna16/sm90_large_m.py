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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import aggregate, descriptor
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait
from qkernels.gpu.pipeline import Pipeline, PipelineState, make_pipeline, next_stage
from qkernels.gpu.split_k_reduce import reduce_scatter
from qkernels.gpu.tma import aligned
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16.dequant import factors, in_full, load_pieces, rows_layout, unpack
from qkernels.wna16.layout import TILE_N
from qkernels.wna16.numerics import weight_numerics
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.sm90_large_m_epilogue import store
from qkernels.wna16.sm90_large_m_load import (
    Operands,
    Sizes,
    Stages,
    load,
    num_work_tiles,
    work_tile,
)

SLICE = 64  # inputs of one copy of x: 128 bytes, the widest swizzle


def words_box(bits: int) -> list[int]:
    """A stored tile's words of 128 inputs, in rows of 128 bytes."""
    return [8 * bits, 32]


def run(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: LargeMConfig,
) -> torch.Tensor:
    """x [M, K], contiguous, to [M, N]. For groups of 128 n."""
    x_MK = aligned(x_MK)
    M, K = x_MK.shape
    N = weight.out_features
    y_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    partials, counters = workspace(x_MK.device)
    tiles = config.tiles(M, N)
    scales, offsets = weight.tensors["scales"], weight.tensors.get("offsets")
    box = words_box(weight.spec.bits)
    format = weight_numerics(weight, bias)
    # parts of a tile wait for each other: all must run at once
    whole_grid = config.fits(M, N, K) and config.blocks == tiles * config.split
    assert config.split == 1 or whole_grid, config
    assert config.blocks <= sm_count(x_MK.device), config
    assert config.bits == format.bits, "a config of the other bits holds more or fewer stages"
    with on_device(x_MK):
        launch(
            _w4a16_hopper,
            (config.blocks,),
            descriptor(x_MK, [config.block_m, SLICE]),
            descriptor(x_MK, [config.block_m // 2, SLICE]),
            descriptor(weight.tensors["words"].view(-1, box[1]), box),
            scales,
            scales if offsets is None else offsets,
            scales if bias is None else bias,
            descriptor(y_MN, [config.store_rows, TILE_N]),
            partials,
            counters,
            M,
            N,
            K,
            tiles // config.blocks * config.blocks if config.halves else tiles,
            TILE=_compiled_in(config),
            FORMAT=format,
            num_warps=4,
            maxnreg=config.registers,
            launch_pdl=True,
        )
    return y_MN


@functools.cache
def _compiled_in(config: LargeMConfig) -> LargeMConfig:
    """The config without its grid: one kernel does any number of tiles."""
    return replace(config, blocks=0)


@aggregate
class _Results:
    """What the epilogue reads and writes."""

    y: tma.tensor_descriptor
    buffers: gl.shared_memory_descriptor  # [num_consumers * store_buffers, store_rows, 64]
    bias_ptr: gl.tensor
    partials_ptr: gl.tensor
    counters_ptr: gl.tensor


@aggregate
class _ConsumerState:
    """Where a consumer is: in the stages of x, and in the slots of packed weights."""

    x: PipelineState
    slot: gl.tensor


@gluon.jit
def _load_scales(operands, ptr_rows, step, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """A step's scales and offsets [64], as they are in memory."""
    group = ptr_rows + step // FORMAT.steps_of_group * 64
    scale = gl.load(operands.scales_ptr + group)
    if FORMAT.has_offsets:
        return scale, gl.load(operands.offsets_ptr + group)
    else:
        return scale, gl.full([64], FORMAT.offset, DTYPE, group.type.layout)


@gluon.jit
def _sums(
    operands,
    pipeline,
    ptr_rows,
    begin,
    end,
    state,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    BM: gl.constexpr,
    FORMAT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """This warpgroup's 64 outputs by BM rows, over some steps; and the state after them.

    A product goes on reading its left registers after it was issued. It is waited for when the
    next ones were issued, which have registers of their own: a step has an even number of products.
    """
    stages = pipeline.mem
    PARTS: gl.constexpr = TILE.parts
    STAGES_OF_STEP: gl.constexpr = TILE.stages_of_step
    BOXES: gl.constexpr = 2 // STAGES_OF_STEP
    PIECE: gl.constexpr = TILE.piece
    PIECES: gl.constexpr = 128 // PIECE
    OF_NEXT_STAGE: gl.constexpr = PIECES // STAGES_OF_STEP  # the first piece that is
    AHEAD: gl.constexpr = TILE.ahead
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    x_state = state.x
    slot = state.slot
    scale, offset = _load_scales(operands, ptr_rows, begin, FORMAT, DTYPE)
    sums = gl.zeros([64, BM], gl.float32, LAYOUT)
    for step in range(begin, end):
        of_rows = factors(scale, offset, FORMAT, DTYPE)
        # the next step's, which the copying warp has asked for; after the last: any
        next_step = gl.minimum(step + 1, end - 1)
        scale, offset = _load_scales(operands, ptr_rows, next_step, FORMAT, DTYPE)
        pipeline.consumer_wait(x_state)
        pieces = load_pieces(stages.words.index(slot * PARTS + WHICH), PIECE, FORMAT.bits)
        for i in gl.static_range(PIECES):
            left = unpack(pieces[i], of_rows, FORMAT, DTYPE, LEFT)
            if i == OF_NEXT_STAGE:
                x_state = x_state.advance()
                pipeline.consumer_wait(x_state)
            box = BOXES * x_state.stage + i * PIECE // 64 % BOXES
            x = stages.x.index(box).slice(0, BM, dim=0)
            if PIECE < 64:
                x = x.slice(i * PIECE % 64, PIECE, dim=1)
            sums = warpgroup_mma(left, x.permute([1, 0]), sums, is_async=True)
            # the product before this one is over
            sums = warpgroup_mma_wait(TILE.pending, deps=[sums])
            if i == OF_NEXT_STAGE + TILE.pending - 1:
                pipeline.consumer_release_previous(x_state)
            elif AHEAD and i == TILE.pending - 1:
                pipeline.consumer_release_previous(x_state, pred=step > begin)
        if not AHEAD:
            sums = warpgroup_mma_wait(0, deps=[sums])
            pipeline.consumer_release(x_state)
        x_state = x_state.advance()
        slot = next_stage(slot, TILE.words_slots)
    if AHEAD:
        sums = warpgroup_mma_wait(0, deps=[sums])
        pipeline.consumer_release_previous(x_state)
    return sums, _ConsumerState(x=x_state, slot=slot)


@gluon.jit
def _multiply_tiles(
    operands,
    pipeline,
    results,
    sizes,
    first,
    end,
    state,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    HALF: gl.constexpr,
    FORMAT: gl.constexpr,
):
    DTYPE: gl.constexpr = results.y.dtype
    PARTS: gl.constexpr = TILE.parts
    SPLIT: gl.constexpr = TILE.split
    BM: gl.constexpr = TILE.block_m // 2 if HALF else TILE.block_m
    rows = gl.arange(0, 64, rows_layout(TILE.piece, FORMAT.bits))
    for index in range(first, end, gl.num_programs(0)):
        work = work_tile(index, sizes, TILE, HALF)
        stored = gl.minimum(work.tile_n * PARTS + WHICH, sizes.stored_tiles - 1)
        ptr_rows = stored * (sizes.k_steps // FORMAT.steps_of_group) * 64 + rows
        sums, state = _sums(
            operands,
            pipeline,
            ptr_rows,
            work.begin,
            work.end,
            state,
            WHICH,
            TILE,
            BM,
            FORMAT,
            DTYPE,
        )
        m = work.m
        if SPLIT > 1:
            sums = reduce_scatter(
                sums,
                work.tile * PARTS + WHICH,
                work.split,
                results.partials_ptr,
                results.counters_ptr,
                SPLIT,
            )
            m += work.split * (BM // SPLIT)
        n = (work.tile_n * PARTS + WHICH) * 64
        sums = in_full(sums, FORMAT, DTYPE)
        store(
            sums,
            results.bias_ptr,
            results.y,
            results.buffers,
            WHICH,
            m,
            n,
            sizes.N,
            FORMAT.has_bias,
            TILE.store_buffers,
        )
    return state


@gluon.jit
def _multiply(
    operands: Operands,
    pipeline: Pipeline,
    results: _Results,
    sizes: Sizes,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """One warpgroup: the products of its 64 outputs of each tile, and their results."""
    whole_end, all_end = num_work_tiles(sizes, TILE)
    first = gl.program_id(0)
    state = _ConsumerState(x=pipeline.consumer_start(), slot=gl.to_tensor(0))
    griddepcontrol_wait()
    state = _multiply_tiles(
        operands,
        pipeline,
        results,
        sizes,
        first,
        whole_end,
        state,
        WHICH,
        TILE,
        False,
        FORMAT,
    )
    if TILE.halves:
        first += whole_end
        _multiply_tiles(
            operands,
            pipeline,
            results,
            sizes,
            first,
            all_end,
            state,
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
    pipeline = make_pipeline(Stages(x=xs, words=words), STAGES, PARTS)
    fence_async_shared()
    operands = Operands(
        x=x_desc,
        half_x=half_desc,
        words=words_desc,
        scales_ptr=scales_ptr,
        offsets_ptr=offsets_ptr,
    )
    results = _Results(
        y=y_desc,
        buffers=y_bufs,
        bias_ptr=bias_ptr,
        partials_ptr=partials_ptr,
        counters_ptr=counters_ptr,
    )
    sizes = Sizes(
        N=N,
        tiles_n=gl.cdiv(N, PARTS * 64),
        tiles_m=gl.cdiv(M, BM),
        k_steps=K // 128,
        stored_tiles=gl.cdiv(N, 64),
        whole=whole,
    )
    MULTIPLY: gl.constexpr = TILE.multiply_registers
    COPY: gl.constexpr = TILE.copy_registers
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_multiply, (operands, pipeline, results, sizes, 0, TILE, FORMAT)),
                (_multiply, (operands, pipeline, results, sizes, 1, TILE, FORMAT)),
                (load, (operands, pipeline, sizes, TILE, FORMAT)),
            ],
            [4, 1],
            [MULTIPLY, COPY],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (operands, pipeline, results, sizes, 0, TILE, FORMAT)),
                (_multiply, (operands, pipeline, results, sizes, 1, TILE, FORMAT)),
                (_multiply, (operands, pipeline, results, sizes, 2, TILE, FORMAT)),
                (load, (operands, pipeline, sizes, TILE, FORMAT)),
            ],
            [4, 4, 1],
            [MULTIPLY, MULTIPLY, COPY],
        )
