"""The copying warp of the Hopper body, and how a block's work is numbered, in Gluon.

The x of a step of 128 inputs lies in one stage of a ring, or half of it in each of two. A step's
words come with its first stage and lie in a ring of their own, with a place for each step that has
begun: it is free when that stage is. The warp waits for `empty` of a stage, fills it and tells
`full`.

Legend: M rows of x, N outputs; a unit is a tile, half of one or a part of its steps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from qkernels.gpu.gluon_compat import aggregate, integer, tma_load
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import Pipeline, PipelineState, next_stage


@aggregate
class Operands:
    """What the producer loads, by TMA or into the L2, and consumers read."""

    x: tma.tensor_descriptor  # boxes [BM, 64]
    half_x: tma.tensor_descriptor  # boxes [BM / 2, 64]
    words: tma.tensor_descriptor
    scales_ptr: gl.tensor
    offsets_ptr: gl.tensor


@aggregate
class Stages:
    """Shared memory: x by stage and 64 inputs; words by slot and consumer."""

    x: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor


@aggregate
class Sizes:
    N: integer
    tiles_n: gl.tensor
    tiles_m: gl.tensor
    k_steps: gl.tensor
    stored_tiles: gl.tensor
    whole: integer  # tiles that are not cut in halves


@aggregate
class WorkTile:
    """What a block does at a time: a tile, half of one, or one split of its K steps."""

    tile: gl.tensor
    split: integer
    tile_n: gl.tensor
    m: gl.tensor  # the first row
    begin: integer
    end: gl.tensor


@aggregate
class _ProducerState:
    """Where the producer is: in the stages of x, in the slots of words, and of all steps."""

    x: PipelineState
    slot: gl.tensor
    steps: gl.tensor


@gluon.jit
def _prefetch(ptr):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr], gl.int32, False, 1
    )


@gluon.jit
def _place(tile, tiles_n, tiles_m):
    """(output tile, row tile). Blocks that run together share weights, and rows of x."""
    OF_GROUP: gl.constexpr = 8
    group = tile // (OF_GROUP * tiles_m)
    height = gl.minimum(tiles_n - group * OF_GROUP, OF_GROUP)
    inside = tile % (OF_GROUP * tiles_m)
    return group * OF_GROUP + inside % height, inside // height


@gluon.jit
def work_tile(index, sizes, TILE: gl.constexpr, HALF: gl.constexpr):
    SPLIT: gl.constexpr = TILE.split
    BM: gl.constexpr = TILE.block_m
    if HALF:
        tile = sizes.whole + (index - sizes.whole) // 2
        tile_n, tile_m = _place(tile, sizes.tiles_n, sizes.tiles_m)
        return WorkTile(
            tile=tile,
            split=0,
            tile_n=tile_n,
            m=tile_m * BM + (index - sizes.whole) % 2 * (BM // 2),
            begin=0,
            end=sizes.k_steps,
        )
    else:
        tile = index // SPLIT
        split = index % SPLIT
        tile_n, tile_m = _place(tile, sizes.tiles_n, sizes.tiles_m)
        return WorkTile(
            tile=tile,
            split=split,
            tile_n=tile_n,
            m=tile_m * BM,
            begin=split * sizes.k_steps // SPLIT,
            end=(split + 1) * sizes.k_steps // SPLIT,
        )


@gluon.jit
def num_work_tiles(sizes, TILE: gl.constexpr):
    """(those that are no halves, all)."""
    if TILE.halves:
        return sizes.whole, 2 * sizes.tiles_n * sizes.tiles_m - sizes.whole
    else:
        all_tiles = sizes.tiles_n * sizes.tiles_m * TILE.split
        return all_tiles, all_tiles


@gluon.jit
def _load_words(
    operands,
    pipeline,
    state,
    slot,
    sizes,
    tile_n,
    step,
    pred,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """A step's words into their slot, for the barrier of a stage; its scales only into the L2."""
    PARTS: gl.constexpr = TILE.parts
    k_steps = sizes.k_steps
    for i in gl.static_range(PARTS):
        # beyond the last stored tile: the last, whose results go nowhere
        stored = gl.minimum(tile_n * PARTS + i, sizes.stored_tiles - 1)
        row = (stored * k_steps + step) * (8 * FORMAT.bits)
        words = pipeline.mem.words.index(slot * PARTS + i)
        tma_load(operands.words, [row, 0], pipeline.full_barrier(state), words, pred=pred)
        group = (stored * (k_steps // FORMAT.steps_of_group) + step // FORMAT.steps_of_group) * 64
        _prefetch(operands.scales_ptr + group)
        if FORMAT.has_offsets:
            _prefetch(operands.offsets_ptr + group)


@gluon.jit
def _load_tiles(
    operands,
    pipeline,
    sizes,
    first,
    end,
    started,
    state,
    TILE: gl.constexpr,
    HALF: gl.constexpr,
    FORMAT: gl.constexpr,
):
    BM: gl.constexpr = TILE.block_m // 2 if HALF else TILE.block_m
    STAGES_OF_STEP: gl.constexpr = TILE.stages_of_step
    BOXES: gl.constexpr = 2 // STAGES_OF_STEP
    X_BYTES: gl.constexpr = BM * 128 * BOXES
    WORDS_BYTES: gl.constexpr = TILE.parts * FORMAT.bits * 1024
    x_state = state.x
    slot = state.slot
    count = state.steps
    desc = operands.half_x if HALF else operands.x
    for index in range(first, end, gl.num_programs(0)):
        work = work_tile(index, sizes, TILE, HALF)
        for step in range(work.begin, work.end):
            fresh = count >= started
            for i in gl.static_range(STAGES_OF_STEP):
                pipeline.producer_acquire(x_state)
                if i == 0:
                    pipeline.producer_expect(x_state, X_BYTES + WORDS_BYTES, pred=fresh)
                    _load_words(
                        operands,
                        pipeline,
                        x_state,
                        slot,
                        sizes,
                        work.tile_n,
                        step,
                        fresh,
                        TILE,
                        FORMAT,
                    )
                else:
                    pipeline.producer_expect(x_state, X_BYTES)
                for j in gl.static_range(BOXES):
                    box = pipeline.mem.x.index(BOXES * x_state.stage + j).slice(0, BM, dim=0)
                    place = [work.m, step * 128 + (i * BOXES + j) * 64]
                    tma_load(desc, place, pipeline.full_barrier(x_state), box)
                x_state = x_state.advance()
            slot = next_stage(slot, TILE.words_slots)
            count += 1
    return _ProducerState(x=x_state, slot=slot, steps=count)


@gluon.jit
def load(
    operands: Operands,
    pipeline: Pipeline,
    sizes: Sizes,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """The producer warp: waits for a stage to be empty, and fills it by TMA."""
    STAGES_OF_STEP: gl.constexpr = TILE.stages_of_step
    BYTES: gl.constexpr = TILE.block_m * 256 // STAGES_OF_STEP + TILE.parts * FORMAT.bits * 1024
    whole_end, all_end = num_work_tiles(sizes, TILE)
    first = gl.program_id(0)
    # weights never change: their share of the first steps needs no wait for the kernel before
    work = work_tile(first, sizes, TILE, False)
    started = gl.minimum(work.end - work.begin, TILE.words_slots)
    if TILE.halves:
        started = gl.where(first < whole_end, started, 0)
    for slot in range(started):
        step = work.begin + slot
        state = pipeline.producer_start(STAGES_OF_STEP * slot)
        pipeline.producer_expect(state, BYTES)
        _load_words(
            operands,
            pipeline,
            state,
            slot,
            sizes,
            work.tile_n,
            step,
            True,
            TILE,
            FORMAT,
        )
    griddepcontrol_wait()
    state = _ProducerState(x=pipeline.producer_start(), slot=gl.to_tensor(0), steps=gl.to_tensor(0))
    state = _load_tiles(
        operands, pipeline, sizes, first, whole_end, started, state, TILE, False, FORMAT
    )
    if TILE.halves:
        _load_tiles(
            operands,
            pipeline,
            sizes,
            whole_end + first,
            all_end,
            started,
            state,
            TILE,
            True,
            FORMAT,
        )
    launch_dependents()
