"""A ring of stages in shared memory, in Gluon: its barriers and its steps. Knows no operation."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def new_barriers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """(full, empty) of each slot: one warp fills it, and each of its readers gives it back."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


@gluon.jit
def after(stage, SIZE: gl.constexpr):
    """The next one of a ring."""
    return gl.where(stage == SIZE - 1, 0, stage + 1)


@gluon.jit
def advance(stage, phase, SIZE: gl.constexpr):
    """The next stage of a ring, and the phase of its barriers."""
    return after(stage, SIZE), phase ^ (stage == SIZE - 1).to(gl.int32)
