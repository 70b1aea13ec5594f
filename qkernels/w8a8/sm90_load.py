"""The producer warp of w8a8/sm90.py, in Gluon: TMA loads of A and B into the pipeline."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.gluon_compat import tma_load
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import PipelineState
from qkernels.w8a8.config import WEIGHT_BOX_ROWS

BOX_ROWS = gl.constexpr(WEIGHT_BOX_ROWS)


@gluon.jit
def _load_weight(gemm, pipeline, state, tile, k_step, pred):
    """Load a tile's weight rows of a K step into the stage of A or B."""
    CONFIG: gl.constexpr = gemm.CONFIG
    ROWS: gl.constexpr = gemm.weight.block_type.shape[0]
    IS_A: gl.constexpr = CONFIG.weight_is_a
    CONSUMERS: gl.constexpr = CONFIG.num_consumers if IS_A else 1
    LOADS: gl.constexpr = (CONFIG.stored_rows if IS_A else CONFIG.block_b) // ROWS
    LOADS_OF_BOX: gl.constexpr = BOX_ROWS // ROWS
    for i in gl.static_range(CONSUMERS):
        if IS_A:
            buffer = pipeline.mem.a.index(state.stage * CONSUMERS + i)
        else:
            buffer = pipeline.mem.b.index(state.stage)
        for j in gl.static_range(LOADS):
            load = (tile * CONSUMERS + i) * LOADS + j
            box = load // LOADS_OF_BOX * gemm.k_steps + k_step
            row = (box * LOADS_OF_BOX + load % LOADS_OF_BOX) * ROWS
            rows = buffer.slice(j * ROWS, ROWS, dim=0)
            tma_load(gemm.weight, [row, 0], pipeline.full_barrier(state), rows, pred=pred)


@gluon.jit
def _load_x(gemm, pipeline, state, work_tile, k_step):
    """Load a tile's rows of x of a K step into the stage of B or A."""
    CONFIG: gl.constexpr = gemm.CONFIG
    CONSUMERS: gl.constexpr = CONFIG.num_consumers
    BK: gl.constexpr = gemm.x.block_type.shape[1]
    barrier = pipeline.full_barrier(state)
    if CONFIG.weight_is_a:
        row = work_tile.tile_b * CONFIG.block_b
        tma_load(gemm.x, [row, k_step * BK], barrier, pipeline.mem.b.index(state.stage))
    else:
        for i in gl.static_range(CONSUMERS):
            row = (work_tile.tile_a * CONSUMERS + i) * CONFIG.consumer_rows
            buffer = pipeline.mem.a.index(state.stage * CONSUMERS + i)
            tma_load(gemm.x, [row, k_step * BK], barrier, buffer)


@gluon.jit
def load(gemm, pipeline):
    """Load all K steps of the block's work tiles."""
    CONFIG: gl.constexpr = gemm.CONFIG
    BK: gl.constexpr = gemm.x.block_type.shape[1]
    BYTES: gl.constexpr = (CONFIG.num_consumers * CONFIG.stored_rows + CONFIG.block_b) * BK
    first = gl.program_id(0)
    num_work_tiles = gemm.num_work_tiles()
    # weights never change, so their loads into the first stages do not wait for the previous kernel
    work_tile = gemm.work_tile(first)
    num_prefetched = gl.minimum(work_tile.k_end - work_tile.k_begin, CONFIG.prefetch_stages)
    for stage in range(num_prefetched):
        state = PipelineState(stage=stage, phase=stage, num_stages=pipeline.num_stages)
        pipeline.producer_expect(state, BYTES)
        tile = work_tile.tile_a if CONFIG.weight_is_a else work_tile.tile_b
        _load_weight(gemm, pipeline, state, tile, work_tile.k_begin + stage, True)
    griddepcontrol_wait()
    state = pipeline.producer_start()
    count = 0
    for work in range(first, num_work_tiles, gl.num_programs(0)):
        work_tile = gemm.work_tile(work)
        tile = work_tile.tile_a if CONFIG.weight_is_a else work_tile.tile_b
        for k_step in range(work_tile.k_begin, work_tile.k_end):
            pipeline.producer_acquire(state)
            not_prefetched = count >= num_prefetched
            pipeline.producer_expect(state, BYTES, pred=not_prefetched)
            _load_weight(gemm, pipeline, state, tile, k_step, not_prefetched)
            _load_x(gemm, pipeline, state, work_tile, k_step)
            count += 1
            state = state.advance()
    launch_dependents()
