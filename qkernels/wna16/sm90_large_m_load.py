"""The producer warp of sm90_large_m.py, in Gluon: TMA loads of packed weights and x.

The x of a K step takes one stage of the pipeline, or half of it in each of two stages. A step's
packed weights are loaded with its first stage and complete that stage's barrier, but are stored in
a separate slot. There is a slot for each K step that the stages can hold; it is free when that
stage is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.gluon_compat import aggregate, tma_load
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import PipelineState, next_stage


@aggregate
class _ProducerState:
    stage: PipelineState
    weight_slot: gl.tensor
    loaded: gl.tensor  # number of loaded K steps


@gluon.jit
def _prefetch(ptr):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr], gl.int32, False, 1
    )


@gluon.jit
def _load_weight(gemm, pipeline, state, weight_slot, tile_n, k_step, pred):
    """Load a K step's packed weights, and prefetch its scales into the L2 for the consumers."""
    NUMERICS: gl.constexpr = gemm.NUMERICS
    CONSUMERS: gl.constexpr = gemm.CONFIG.num_consumers
    for i in gl.static_range(CONSUMERS):
        stored_tile = gemm.stored_tile(tile_n, i)
        row = (stored_tile * gemm.k_steps + k_step) * (8 * NUMERICS.bits)
        packed = pipeline.mem.weight.index(weight_slot * CONSUMERS + i)
        tma_load(gemm.weight, [row, 0], pipeline.full_barrier(state), packed, pred=pred)
        groups = gemm.k_steps // NUMERICS.steps_per_group
        group = (stored_tile * groups + k_step // NUMERICS.steps_per_group) * 64
        _prefetch(gemm.scales_ptr + group)
        if NUMERICS.has_offsets:
            _prefetch(gemm.offsets_ptr + group)


@gluon.jit
def _load_tiles(gemm, pipeline, first, end, prefetched, state, HALF: gl.constexpr):
    """Load all K steps of the block's work tiles from `first` to `end`. Return the next state."""
    CONFIG: gl.constexpr = gemm.CONFIG
    BM: gl.constexpr = CONFIG.block_m // 2 if HALF else CONFIG.block_m
    STAGES_PER_STEP: gl.constexpr = CONFIG.stages_per_step
    BOXES: gl.constexpr = 2 // STAGES_PER_STEP  # boxes of x per stage
    X_BYTES: gl.constexpr = BM * 128 * BOXES
    WEIGHT_BYTES: gl.constexpr = CONFIG.num_consumers * gemm.NUMERICS.bits * 1024
    stage = state.stage
    weight_slot = state.weight_slot
    loaded = state.loaded
    x = gemm.half_x if HALF else gemm.x
    for work in range(first, end, gl.num_programs(0)):
        work_tile = gemm.work_tile(work, HALF)
        for k_step in range(work_tile.k_begin, work_tile.k_end):
            pred = loaded >= prefetched
            for i in gl.static_range(STAGES_PER_STEP):
                pipeline.producer_acquire(stage)
                if i == 0:
                    pipeline.producer_expect(stage, X_BYTES + WEIGHT_BYTES, pred)
                    _load_weight(gemm, pipeline, stage, weight_slot, work_tile.tile_n, k_step, pred)
                else:
                    pipeline.producer_expect(stage, X_BYTES)
                for j in gl.static_range(BOXES):
                    box = pipeline.mem.x.index(BOXES * stage.stage + j).slice(0, BM, dim=0)
                    k = k_step * 128 + (i * BOXES + j) * 64
                    tma_load(x, [work_tile.m, k], pipeline.full_barrier(stage), box)
                stage = stage.advance()
            weight_slot = next_stage(weight_slot, CONFIG.weight_slots)
            loaded += 1
    return _ProducerState(stage=stage, weight_slot=weight_slot, loaded=loaded)


@gluon.jit
def load(gemm, pipeline):
    """Load all K steps of the block's work tiles."""
    CONFIG: gl.constexpr = gemm.CONFIG
    STAGES_PER_STEP: gl.constexpr = CONFIG.stages_per_step
    X_BYTES: gl.constexpr = CONFIG.block_m * 256 // STAGES_PER_STEP
    BYTES: gl.constexpr = X_BYTES + CONFIG.num_consumers * gemm.NUMERICS.bits * 1024
    whole_end, end = gemm.num_work_tiles()
    first = gl.program_id(0)
    # weights never change, so their loads into the first slots do not wait for the previous kernel
    work_tile = gemm.work_tile(first, False)
    prefetched = gl.minimum(work_tile.k_end - work_tile.k_begin, CONFIG.weight_slots)
    if CONFIG.tail_split:
        prefetched = gl.where(first < whole_end, prefetched, 0)
    for slot in range(prefetched):
        k_step = work_tile.k_begin + slot
        stage = pipeline.producer_start(STAGES_PER_STEP * slot)
        pipeline.producer_expect(stage, BYTES)
        _load_weight(gemm, pipeline, stage, slot, work_tile.tile_n, k_step, True)
    griddepcontrol_wait()
    state = _ProducerState(
        stage=pipeline.producer_start(), weight_slot=gl.to_tensor(0), loaded=gl.to_tensor(0)
    )
    state = _load_tiles(gemm, pipeline, first, whole_end, prefetched, state, False)
    if CONFIG.tail_split:
        _load_tiles(gemm, pipeline, whole_end + first, end, prefetched, state, True)
    launch_dependents()
