"""The four warps of sm90_decode.py that load entries by TMA, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.gluon_compat import reshaped, tma_load
from qkernels.gpu.pdl_gluon import griddepcontrol_wait
from qkernels.latent.sm90_decode_structs import KEYS, STAGES, WIDTH


@gluon.jit
def load(latents, shared, tile, PDL: gl.constexpr, PART: gl.constexpr):
    """Load a quarter of the columns of each step's entries, as far ahead as there are stages.

    Four warps share the 36 TMA loads of a step, of about 15 instructions each: one warp alone would
    hardly issue them as fast as memory delivers the entries. Part 0 announces the bytes of all to
    the barrier of the stage, which therefore cannot complete before.

    In the swizzled order, WIDTH columns of consecutive keys are contiguous: the box of some keys
    and one chunk c of a stage is [stage, c, keys].
    """
    L: gl.constexpr = latents.L
    desc = latents.pages
    B: gl.constexpr = desc.block_shape[1]  # tokens of a box: a page, or KEYS of a larger one
    PAGE: gl.constexpr = latents.PAGE
    BOXES: gl.constexpr = KEYS // B
    CHUNKS: gl.constexpr = L // WIDTH
    FIRST: gl.constexpr = PART * CHUNKS // 4
    END: gl.constexpr = (PART + 1) * CHUNKS // 4
    BYTES: gl.constexpr = KEYS * (L + WIDTH) * (desc.dtype.primitive_bitwidth // 8)
    layout: gl.constexpr = desc.layout
    entries = shared.entries
    latent_shape: gl.constexpr = [STAGES * CHUNKS * BOXES, 1, B, WIDTH]
    rope_shape: gl.constexpr = [STAGES * BOXES, 1, B, WIDTH]
    latent_boxes = reshaped(entries.mem.latent, latent_shape, layout)
    rope_boxes = reshaped(entries.mem.rope, rope_shape, layout)
    if PDL:
        griddepcontrol_wait()
    nowhere = desc.shape[0]
    for step in range(tile.first_step, tile.last_step):
        pages = ()
        for b in gl.static_range(BOXES):
            key = step * KEYS + b * B
            # Pages beyond may be freed or never written: TMA writes zeros if a coordinate is
            # outside of the pool.
            page = nowhere
            if key < tile.end:
                page = gl.load(tile.table + key // PAGE)
            pages = pages + (page,)
        state = entries.producer_at(step - tile.first_step)
        entries.producer_acquire(state)
        if PART == 0:
            entries.producer_expect(state, BYTES)
        barrier = entries.full_barrier(state)
        for b in gl.static_range(BOXES):
            token = (step * KEYS + b * B) % PAGE
            for c in gl.static_range(FIRST, END):
                box = latent_boxes.index((state.stage * CHUNKS + c) * BOXES + b)
                tma_load(desc, [pages[b], token, c * WIDTH], barrier, box)
            if PART == 2:  # which has no chunk if there are two
                box = rope_boxes.index(state.stage * BOXES + b)
                tma_load(desc, [pages[b], token, L], barrier, box)
