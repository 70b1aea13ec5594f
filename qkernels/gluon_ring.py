"""Steps of a ring of stages in shared memory, in Gluon. Knows no operation."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def after(stage, SIZE: gl.constexpr):
    """The next one of a ring."""
    return gl.where(stage == SIZE - 1, 0, stage + 1)


@gluon.jit
def advance(stage, phase, SIZE: gl.constexpr):
    """The next stage of a ring, and the phase of its barriers."""
    return after(stage, SIZE), phase ^ (stage == SIZE - 1).to(gl.int32)
