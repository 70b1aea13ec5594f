"""W4A16 and W8A16 for many rows on sm_90, in Gluon: y^T = W x^T with wgmma.

A persistent, warp-specialized kernel. One producer warp keeps TMA loads of packed weights and x in
flight, as far ahead as shared memory allows. Two or three consumer warpgroups multiply 64 outputs
each: operand A is weights, unpacked and scaled in registers; operand B is x, in shared memory.

If there are fewer tiles than SMs, K is split over several blocks, which reduce-scatter their sums.
A single block can also sum the same ranges of K one after the other (segments), which gives the
same bits as the split.

Legend: M rows of x, K inputs, N outputs, G groups; BM rows of a tile or of half a tile; a K step is
128 inputs.
"""

import functools

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
from qkernels.gpu.gluon_compat import aggregate, descriptor, tma_store
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl_gluon import griddepcontrol_wait
from qkernels.gpu.pipeline import PipelineState, make_pipeline, next_stage
from qkernels.gpu.registers import split_columns
from qkernels.gpu.split_k_reduce import accumulate, reduce_scatter
from qkernels.gpu.tma import aligned
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16.dequant import factors, load_k_subtiles, rescale, rows_layout, unpack
from qkernels.wna16.layout import TILE_N
from qkernels.wna16.prepack import weight_numerics
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.sm90_large_m_load import load
from qkernels.wna16.sm90_large_m_structs import Gemm, Stages, WorkTile

X_BOX_K = 64  # inputs of one TMA box of x: 128 bytes, the widest swizzle


def weight_box(bits: int) -> list[int]:
    """Return the TMA box of a stored tile's packed words of 128 inputs, in rows of 128 bytes."""
    return [8 * bits, 32]


def run(
    x_MK: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    config: LargeMConfig,
    y_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply contiguous x [M, K] to [M, N], for groups divisible by 128.

    The result is written to `y_MN` if it is given.
    """
    x_MK = aligned(x_MK)
    M, K = x_MK.shape
    N = weight.out_features
    if y_MN is None:
        y_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    partials, counters = workspace(x_MK.device)
    tiles = config.tiles(M, N)
    scales, offsets = weight.tensors["scales"], weight.tensors.get("offsets")
    box = weight_box(weight.spec.bits)
    numerics = weight_numerics(weight, bias)
    # the splits of a tile wait for each other: all blocks must be resident together
    one_block_each = config.fits(M, N, K) and config.blocks == tiles * config.split
    assert config.split == 1 or one_block_each, config
    assert config.blocks <= sm_count(x_MK.device), config
    assert config.bits == numerics.bits, "the number of stages depends on the bits"
    with on_device(x_MK):
        launch(
            _wna16_large_m,
            (config.blocks,),
            descriptor(x_MK, [config.block_m, X_BOX_K]),
            descriptor(x_MK, [config.block_m // 2, X_BOX_K]),
            descriptor(weight.tensors["packed"].view(-1, box[1]), box),
            scales,
            scales if offsets is None else offsets,
            scales if bias is None else bias,
            descriptor(y_MN, [config.store_rows, TILE_N]),
            partials,
            counters,
            M,
            N,
            K,
            tiles // config.blocks * config.blocks if config.tail_split else tiles,
            CONFIG=_compiled(config),
            NUMERICS=numerics,
            num_warps=4,
            maxnreg=config.registers,
            launch_pdl=True,
        )
    return y_MN


@functools.cache
def _compiled(config: LargeMConfig) -> LargeMConfig:
    """Return config.compiled, cached: making the object takes host time in each launch."""
    return config.compiled


@aggregate
class _ConsumerState:
    stage: PipelineState
    weight_slot: gl.tensor


@gluon.jit
def _load_scales(gemm, rows, k_step):
    """Load a K step's scales and offsets [64], unconverted."""
    NUMERICS: gl.constexpr = gemm.NUMERICS
    group = rows + k_step // NUMERICS.steps_per_group * 64
    scale = gl.load(gemm.scales_ptr + group)
    if NUMERICS.has_offsets:
        return scale, gl.load(gemm.offsets_ptr + group)
    else:
        return scale, gl.full([64], NUMERICS.offset, gemm.y.dtype, group.type.layout)


@gluon.jit
def _multiply(gemm, pipeline, state, work_tile, rows, CONSUMER: gl.constexpr, BM: gl.constexpr):
    """Return the sums of a consumer's 64 outputs by BM rows of a work tile, and the next state.

    A wgmma reads operand A's registers after it was issued. So the next wgmma uses other registers,
    and the wait for the first follows its issue. A K step has an even number of wgmmas.
    """
    CONFIG: gl.constexpr = gemm.CONFIG
    NUMERICS: gl.constexpr = gemm.NUMERICS
    DTYPE: gl.constexpr = gemm.y.dtype
    STAGES_PER_STEP: gl.constexpr = CONFIG.stages_per_step
    BOXES: gl.constexpr = 2 // STAGES_PER_STEP
    K_SUBTILE: gl.constexpr = CONFIG.k_subtile
    SUBTILES: gl.constexpr = 128 // K_SUBTILE
    NEXT_STAGE: gl.constexpr = SUBTILES // STAGES_PER_STEP  # the first subtile of the second stage
    IN_FLIGHT: gl.constexpr = CONFIG.mma_in_flight
    ACROSS_STEPS: gl.constexpr = CONFIG.mma_across_steps
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    stages = pipeline.mem
    stage = state.stage
    weight_slot = state.weight_slot
    k_begin = work_tile.k_begin
    k_end = work_tile.k_end
    scale, offset = _load_scales(gemm, rows, k_begin)
    sums = gl.zeros([64, BM], gl.float32, LAYOUT)
    for k_step in range(k_begin, k_end):
        row_factors = factors(scale, offset, NUMERICS, DTYPE)
        # scales of the next step, which the producer has prefetched; unused after the last step
        scale, offset = _load_scales(gemm, rows, gl.minimum(k_step + 1, k_end - 1))
        pipeline.consumer_wait(stage)
        packed = load_k_subtiles(
            stages.weight.index(weight_slot * CONFIG.num_consumers + CONSUMER),
            K_SUBTILE,
            NUMERICS.bits,
        )
        for i in gl.static_range(SUBTILES):
            a = unpack(packed[i], row_factors, NUMERICS, DTYPE, A)
            if i == NEXT_STAGE:
                stage = stage.advance()
                pipeline.consumer_wait(stage)
            box = BOXES * stage.stage + i * K_SUBTILE // 64 % BOXES
            x = stages.x.index(box).slice(0, BM, dim=0)
            if K_SUBTILE < 64:
                x = x.slice(i * K_SUBTILE % 64, K_SUBTILE, dim=1)
            sums = warpgroup_mma(a, x.permute([1, 0]), sums, is_async=True)
            # wait until all but the last IN_FLIGHT have ended
            sums = warpgroup_mma_wait(IN_FLIGHT, deps=[sums])
            if i == NEXT_STAGE + IN_FLIGHT - 1:
                pipeline.consumer_release_previous(stage)
            elif ACROSS_STEPS and i == IN_FLIGHT - 1:
                pipeline.consumer_release_previous(stage, k_step > k_begin)
        if not ACROSS_STEPS:
            sums = warpgroup_mma_wait(0, deps=[sums])
            pipeline.consumer_release(stage)
        stage = stage.advance()
        weight_slot = next_stage(weight_slot, CONFIG.weight_slots)
    if ACROSS_STEPS:
        sums = warpgroup_mma_wait(0, deps=[sums])
        pipeline.consumer_release_previous(stage)
    return sums, _ConsumerState(stage=stage, weight_slot=weight_slot)


@gluon.jit
def _segment(gemm, work_tile, segment):
    """Return the work tile with the K steps of one segment."""
    SEGMENTS: gl.constexpr = gemm.CONFIG.segments
    return WorkTile(
        tile=work_tile.tile,
        split=work_tile.split,
        tile_n=work_tile.tile_n,
        m=work_tile.m,
        k_begin=segment * gemm.k_steps // SEGMENTS,
        k_end=(segment + 1) * gemm.k_steps // SEGMENTS,
    )


@gluon.jit
def _multiply_segments(
    gemm, pipeline, state, work_tile, rows, CONSUMER: gl.constexpr, BM: gl.constexpr
):
    """Run _multiply for each segment of K and add the results in order.

    The total is kept in registers or in the block's workspace.
    """
    CONFIG: gl.constexpr = gemm.CONFIG
    SEGMENTS: gl.constexpr = CONFIG.segments
    if CONFIG.keeps_total:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
        total = gl.zeros([64, BM], gl.float32, LAYOUT)
        for segment in range(SEGMENTS):
            part = _segment(gemm, work_tile, segment)
            sums, state = _multiply(gemm, pipeline, state, part, rows, CONSUMER, BM)
            total += sums
        return total, state
    slot = gl.program_id(0) * CONFIG.num_consumers + CONSUMER
    total_ptr = gemm.partials_ptr + slot * (64 * CONFIG.block_m)
    for segment in range(SEGMENTS - 1):
        part = _segment(gemm, work_tile, segment)
        sums, state = _multiply(gemm, pipeline, state, part, rows, CONSUMER, BM)
        accumulate(sums, total_ptr, segment > 0, True)
    part = _segment(gemm, work_tile, SEGMENTS - 1)
    sums, state = _multiply(gemm, pipeline, state, part, rows, CONSUMER, BM)
    return accumulate(sums, total_ptr, True, False), state


@gluon.jit
def _epilogue(gemm, buffers, sums, m, n, CONSUMER: gl.constexpr):
    """Store a consumer's sums [64 outputs, rows] to y[m:, n : n + 64], one store tile at a time.

    Each store tile goes through one of the consumer's store_stages buffers in shared memory.
    """
    BUFFERS: gl.constexpr = gemm.CONFIG.store_stages
    y = gemm.y
    ROWS: gl.constexpr = y.block_type.shape[0]
    if gemm.NUMERICS.has_bias:
        row = n + gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
        # rows after the last output are not stored, so their bias does not matter
        sums += gl.load(gemm.bias_ptr + gl.minimum(row, gemm.N - 1)).to(gl.float32)[:, None]
    store_tiles = split_columns(sums, sums.shape[1] // ROWS)
    for j in gl.static_range(sums.shape[1] // ROWS):
        # wait until the last TMA store from this buffer has read it
        tma.store_wait(BUFFERS - 1)
        buffer = buffers.index(CONSUMER * BUFFERS + j % BUFFERS)
        buffer.permute((1, 0)).store(store_tiles[j].to(y.dtype))
        fence_async_shared()
        tma_store(y, [m + j * ROWS, n], buffer)


@gluon.jit
def _consume_tiles(
    gemm, pipeline, buffers, first, end, state, CONSUMER: gl.constexpr, HALF: gl.constexpr
):
    """Compute and store the block's work tiles from `first` to `end`. Return the next state."""
    CONFIG: gl.constexpr = gemm.CONFIG
    NUMERICS: gl.constexpr = gemm.NUMERICS
    SPLIT: gl.constexpr = CONFIG.split
    BM: gl.constexpr = CONFIG.block_m // 2 if HALF else CONFIG.block_m
    row = gl.arange(0, 64, rows_layout(CONFIG.k_subtile, NUMERICS.bits))
    for work in range(first, end, gl.num_programs(0)):
        work_tile = gemm.work_tile(work, HALF)
        stored_tile = gemm.stored_tile(work_tile.tile_n, CONSUMER)
        rows = stored_tile * (gemm.k_steps // NUMERICS.steps_per_group) * 64 + row
        if CONFIG.segments > 1:
            sums, state = _multiply_segments(gemm, pipeline, state, work_tile, rows, CONSUMER, BM)
        else:
            sums, state = _multiply(gemm, pipeline, state, work_tile, rows, CONSUMER, BM)
        m = work_tile.m
        if SPLIT > 1:
            slot = work_tile.tile * CONFIG.num_consumers + CONSUMER
            sums = reduce_scatter(
                sums, slot, work_tile.split, gemm.partials_ptr, gemm.counters_ptr, SPLIT
            )
            m += work_tile.split * (BM // SPLIT)
        n = (work_tile.tile_n * CONFIG.num_consumers + CONSUMER) * 64
        _epilogue(gemm, buffers, rescale(sums, NUMERICS, gemm.y.dtype), m, n, CONSUMER)
    return state


@gluon.jit
def _consume(gemm, pipeline, buffers, CONSUMER: gl.constexpr):
    """Run a consumer warpgroup, which computes and stores 64 outputs of each work tile."""
    whole_end, end = gemm.num_work_tiles()
    first = gl.program_id(0)
    state = _ConsumerState(stage=pipeline.consumer_start(), weight_slot=gl.to_tensor(0))
    griddepcontrol_wait()
    state = _consume_tiles(gemm, pipeline, buffers, first, whole_end, state, CONSUMER, False)
    if gemm.CONFIG.tail_split:
        first += whole_end
        _consume_tiles(gemm, pipeline, buffers, first, end, state, CONSUMER, True)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "whole_tiles"])
def _wna16_large_m(
    x,  # as in sm90_large_m_structs.Gemm
    half_x,
    weight,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    y,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    whole_tiles,
    CONFIG: gl.constexpr,
    NUMERICS: gl.constexpr,
):
    DTYPE: gl.constexpr = y.dtype
    CONSUMERS: gl.constexpr = CONFIG.num_consumers
    X_BOXES: gl.constexpr = CONFIG.stages * 2 // CONFIG.stages_per_step
    PACKED: gl.constexpr = CONFIG.weight_slots * CONSUMERS
    BUFFERS: gl.constexpr = CONFIG.store_stages * CONSUMERS
    x_stages = gl.allocate_shared_memory(DTYPE, [X_BOXES, CONFIG.block_m, 64], x.layout)
    packed = gl.allocate_shared_memory(gl.int32, [PACKED, 8 * NUMERICS.bits, 32], weight.layout)
    buffers = gl.allocate_shared_memory(DTYPE, [BUFFERS, CONFIG.store_rows, 64], y.layout)
    pipeline = make_pipeline(Stages(x=x_stages, weight=packed), CONFIG.stages, CONSUMERS)
    fence_async_shared()
    gemm = Gemm(
        x=x,
        half_x=half_x,
        weight=weight,
        scales_ptr=scales_ptr,
        offsets_ptr=offsets_ptr,
        bias_ptr=bias_ptr,
        y=y,
        partials_ptr=partials_ptr,
        counters_ptr=counters_ptr,
        N=N,
        tiles_n=gl.cdiv(N, CONSUMERS * 64),
        tiles_m=gl.cdiv(M, CONFIG.block_m),
        k_steps=K // 128,
        stored_tiles=gl.cdiv(N, 64),
        whole_tiles=whole_tiles,
        CONFIG=CONFIG,
        NUMERICS=NUMERICS,
    )
    CONSUMER: gl.constexpr = CONFIG.consumer_registers
    PRODUCER: gl.constexpr = CONFIG.producer_registers
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (gemm, pipeline, buffers, 0)),
                (_consume, (gemm, pipeline, buffers, 1)),
                (load, (gemm, pipeline)),
            ],
            [4, 1],
            [CONSUMER, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (gemm, pipeline, buffers, 0)),
                (_consume, (gemm, pipeline, buffers, 1)),
                (_consume, (gemm, pipeline, buffers, 2)),
                (load, (gemm, pipeline)),
            ],
            [4, 4, 1],
            [CONSUMER, CONSUMER, PRODUCER],
        )
