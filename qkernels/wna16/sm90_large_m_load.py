"""The copying warp of the Hopper body, and how a block's work is numbered, in Gluon.

The x of a step of 128 inputs lies in one stage of a ring, or half of it in each of two. A step's
words come with its first stage and lie in a ring of their own, with a place for each step that has
begun: it is free when that stage is. The warp waits for `empty` of a stage, fills it and tells
`full`.

Legend: M rows of x, N outputs; a unit is a tile, half of one or a part of its steps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from qkernels.gpu.gluon_compat import tma_load
from qkernels.gpu.pdl_gluon import griddepcontrol_wait, launch_dependents
from qkernels.gpu.pipeline import advance, after


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
def unit_of_work(unit, sizes, TILE: gl.constexpr, HALF: gl.constexpr):
    """(tile, part of K, output tile, first row, first step, end of steps) of one unit of work."""
    _, tiles_n, tiles_m, steps, _, whole = sizes
    SPLIT: gl.constexpr = TILE.split
    BM: gl.constexpr = TILE.block_m
    if HALF:
        tile = whole + (unit - whole) // 2
        tile_n, tile_m = _place(tile, tiles_n, tiles_m)
        return tile, 0, tile_n, tile_m * BM + (unit - whole) % 2 * (BM // 2), 0, steps
    else:
        tile = unit // SPLIT
        part = unit % SPLIT
        tile_n, tile_m = _place(tile, tiles_n, tiles_m)
        return tile, part, tile_n, tile_m * BM, part * steps // SPLIT, (part + 1) * steps // SPLIT


@gluon.jit
def ends(sizes, TILE: gl.constexpr):
    """(end of the units that are no halves, end of all)."""
    _, tiles_n, tiles_m, _, _, whole = sizes
    if TILE.halves:
        return whole, 2 * tiles_n * tiles_m - whole
    else:
        return tiles_n * tiles_m * TILE.split, tiles_n * tiles_m * TILE.split


@gluon.jit
def _copy_words(
    descs,
    rings,
    pointers,
    sizes,
    tile_n,
    step,
    stage,
    place,
    pred,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """A step's words into their place, for the barrier of a stage; its scales only into the L2."""
    _, _, words_desc, _ = descs
    _, words, _, full, _ = rings
    scales_ptr, offsets_ptr, _, _, _ = pointers
    _, _, _, steps, stored_tiles, _ = sizes
    PARTS: gl.constexpr = TILE.parts
    for i in gl.static_range(PARTS):
        # beyond the last stored tile: the last, whose results go nowhere
        stored = gl.minimum(tile_n * PARTS + i, stored_tiles - 1)
        row = (stored * steps + step) * (8 * FORMAT.bits)
        words_of_part = words.index(place * PARTS + i)
        tma_load(words_desc, [row, 0], full.index(stage), words_of_part, pred=pred)
        group = (stored * (steps // FORMAT.steps_of_group) + step // FORMAT.steps_of_group) * 64
        _prefetch(scales_ptr + group)
        if FORMAT.has_offsets:
            _prefetch(offsets_ptr + group)


@gluon.jit
def _copy_units(
    descs,
    rings,
    pointers,
    sizes,
    first,
    end_unit,
    started,
    count,
    at,
    TILE: gl.constexpr,
    HALF: gl.constexpr,
    FORMAT: gl.constexpr,
):
    x_desc, half_desc, _, _ = descs
    xs, _, _, full, empty = rings
    BM: gl.constexpr = TILE.block_m // 2 if HALF else TILE.block_m
    STAGES_OF_STEP: gl.constexpr = TILE.stages_of_step
    BOXES: gl.constexpr = 2 // STAGES_OF_STEP
    X_BYTES: gl.constexpr = BM * 128 * BOXES
    WORDS_BYTES: gl.constexpr = TILE.parts * FORMAT.bits * 1024
    stage, phase, place = at
    desc = half_desc if HALF else x_desc
    for unit in range(first, end_unit, gl.num_programs(0)):
        tile, part, tile_n, m, begin, end = unit_of_work(unit, sizes, TILE, HALF)
        for step in range(begin, end):
            fresh = count >= started
            for i in gl.static_range(STAGES_OF_STEP):
                mbarrier.wait(empty.index(stage), phase)
                bar = full.index(stage)
                if i == 0:
                    mbarrier.expect(bar, X_BYTES + WORDS_BYTES, pred=fresh)
                    _copy_words(
                        descs,
                        rings,
                        pointers,
                        sizes,
                        tile_n,
                        step,
                        stage,
                        place,
                        fresh,
                        TILE,
                        FORMAT,
                    )
                else:
                    mbarrier.expect(bar, X_BYTES)
                for j in gl.static_range(BOXES):
                    box = xs.index(BOXES * stage + j).slice(0, BM, dim=0)
                    tma_load(desc, [m, step * 128 + (i * BOXES + j) * 64], bar, box)
                stage, phase = advance(stage, phase, TILE.stages)
            place = after(place, TILE.words_slots)
            count += 1
    return count, (stage, phase, place)


@gluon.jit
def copy(descs, rings, pointers, sizes, TILE: gl.constexpr, FORMAT: gl.constexpr):
    """The warp that starts all copies: wait for a stage to be free, fill it, tell `full`."""
    _, _, _, full, _ = rings
    STAGES_OF_STEP: gl.constexpr = TILE.stages_of_step
    BYTES: gl.constexpr = TILE.block_m * 256 // STAGES_OF_STEP + TILE.parts * FORMAT.bits * 1024
    whole_end, all_end = ends(sizes, TILE)
    first = gl.program_id(0)
    zero = first * 0  # not a constant, which could not change in a loop
    # weights never change: their share of the first steps needs no wait for the kernel before
    _, _, tile_n, _, begin, end = unit_of_work(first, sizes, TILE, False)
    started = gl.minimum(end - begin, TILE.words_slots)
    if TILE.halves:
        started = gl.where(first < whole_end, started, 0)
    for place in range(started):
        step, stage = begin + place, STAGES_OF_STEP * place
        mbarrier.expect(full.index(stage), BYTES)
        _copy_words(descs, rings, pointers, sizes, tile_n, step, stage, place, True, TILE, FORMAT)
    griddepcontrol_wait()
    at = (zero, zero + 1, zero)
    count, at = _copy_units(
        descs, rings, pointers, sizes, first, whole_end, started, zero, at, TILE, False, FORMAT
    )
    if TILE.halves:
        _copy_units(
            descs,
            rings,
            pointers,
            sizes,
            whole_end + first,
            all_end,
            started,
            count,
            at,
            TILE,
            True,
            FORMAT,
        )
    launch_dependents()
