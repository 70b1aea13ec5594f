"""The producer warp of w4a8/sm90.py, in Gluon: TMA loads of packed codes, scales and x."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.gluon_compat import tma_load
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents


@gluon.jit
def _load_weight(gemm, pipeline, state, tile_a, k_step, pred):
    """Load a K step's packed codes and scales. Makes the stage expect the bytes of x, too."""
    CONSUMERS: gl.constexpr = gemm.CONFIG.num_consumers
    NUMERICS: gl.constexpr = gemm.NUMERICS
    SCALES: gl.constexpr = gemm.scales.block_type.shape[0]
    SCALE_BYTES: gl.constexpr = gemm.scales.block_type.nbytes if NUMERICS.in_boxes else 0
    BYTES: gl.constexpr = (
        CONSUMERS * (gemm.weight.block_type.nbytes + SCALE_BYTES) + gemm.x.block_type.nbytes
    )
    barrier = pipeline.full_barrier(state)
    pipeline.producer_expect(state, BYTES, pred)
    for i in gl.static_range(CONSUMERS):
        stored_tile = gemm.stored_tile(tile_a, i)
        slot = state.stage * CONSUMERS + i
        row = (stored_tile * gemm.k_steps + k_step) * 32
        tma_load(gemm.weight, [row, 0], barrier, pipeline.mem.weight.index(slot), pred=pred)
        if NUMERICS.in_boxes:
            boxes = gemm.k_steps // NUMERICS.steps_per_group
            box = stored_tile * boxes + k_step // NUMERICS.steps_per_group
            scales = pipeline.mem.scales.index(slot)
            tma_load(gemm.scales, [box * SCALES], barrier, scales, pred=pred)


@gluon.jit
def load(gemm, pipeline):
    """Load all K steps of the block's work tiles."""
    CONFIG: gl.constexpr = gemm.CONFIG
    BK: gl.constexpr = gemm.x.block_type.shape[1]
    first = gl.program_id(0)
    # weights never change, so their loads into the first stages do not wait for the previous kernel
    work_tile = gemm.work_tile(first)
    num_prefetched = gl.minimum(work_tile.k_end - work_tile.k_begin, CONFIG.prefetch_stages)
    for stage in range(num_prefetched):
        state = pipeline.producer_start(stage)
        _load_weight(gemm, pipeline, state, work_tile.tile_a, work_tile.k_begin + stage, True)
    if CONFIG.launch_dependents_first:
        launch_dependents()
    griddepcontrol_wait()
    state = pipeline.producer_start()
    count = 0
    for work in range(first, gemm.num_work_tiles(), gl.num_programs(0)):
        work_tile = gemm.work_tile(work)
        for k_step in range(work_tile.k_begin, work_tile.k_end):
            pipeline.producer_acquire(state)
            not_prefetched = count >= num_prefetched
            _load_weight(gemm, pipeline, state, work_tile.tile_a, k_step, not_prefetched)
            rows = [work_tile.tile_b * CONFIG.block_b, k_step * BK]
            x = pipeline.mem.x.index(state.stage)
            tma_load(gemm.x, rows, pipeline.full_barrier(state), x)
            count += 1
            state = state.advance()
    if not CONFIG.launch_dependents_first:
        launch_dependents()
