"""Sums of a warpgroup that parts of K hand each other through the L2, in Gluon. Knows no operation.

A sum's registers are those of the warpgroup product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.gluon_compat import barrier
from qkernels.gpu.registers import split_columns

NUMBERS_AT_ONCE = gl.constexpr(64 * 128)  # of other parts that a warpgroup has on their way


@gluon.jit
def _lines(sums):
    """Sums [64 R, C] as [R C / 8, 512]: four numbers of a thread side by side. Moves nothing."""
    R: gl.constexpr = sums.shape[0] // 64
    C: gl.constexpr = sums.shape[1] // 8
    # rows: R, 4 warps, 2 halves, 8 lines; columns: C / 8, 4 lanes, 2
    numbers = sums.reshape([R, 4, 2, 8, C, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6])
    return numbers.reshape([R * C, 512])


@gluon.jit
def _from_lines(lines, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    R: gl.constexpr = ROWS // 64
    C: gl.constexpr = lines.shape[0] // R
    numbers = lines.reshape([R, C, 4, 8, 4, 2, 2]).permute([0, 2, 5, 3, 1, 4, 6])
    return gl.convert_layout(numbers.reshape([ROWS, C * 8]), LAYOUT, assert_trivial=True)


@gluon.jit
def _inside(lines):
    """Where in a slot the numbers of _lines are."""
    L: gl.constexpr = lines.type.layout
    row = gl.arange(0, lines.shape[0], gl.SliceLayout(1, L))
    column = gl.arange(0, 512, gl.SliceLayout(0, L))
    return row[:, None] * 512 + column[None, :]


@gluon.jit
def reduce_scatter(sums, place, part, partials_ptr, counters_ptr, SPLIT: gl.constexpr):
    """This part's share of the columns, summed over all parts in order: [rows, columns / SPLIT].

    `place` numbers the warpgroup's share of a tile. Each part hands the others their columns and
    waits for its own, so all parts of a tile must run at once.
    """
    shares = split_columns(sums, SPLIT)
    SIZE: gl.constexpr = shares[0].shape[0] * shares[0].shape[1]
    LAYOUT: gl.constexpr = shares[0].type.layout
    lines = (_lines(shares[0]),)
    for i in gl.static_range(1, SPLIT):
        lines += (_lines(shares[i]),)
    inside = _inside(lines[0])
    slots = partials_ptr + place * (SPLIT * SPLIT * SIZE)  # [share, part that wrote it, SIZE]
    own = lines[0]
    for i in gl.static_range(SPLIT):
        if part == i:
            own = lines[i]
        else:
            gl.store(slots + (i * SPLIT + part) * SIZE + inside, lines[i])
    # every thread's sums are out before one thread counts the warpgroup in
    barrier()
    counter = counters_ptr + place
    arrived = gl.atomic_add(counter, 1, sem="acq_rel") + 1
    while arrived < SPLIT:
        arrived = gl.atomic_add(counter, 0, sem="acquire")
    L: gl.constexpr = own.type.layout
    total = gl.zeros(own.shape, own.dtype, L)
    for i in gl.static_range(SPLIT):
        # .cg: other SMs wrote these, and this SM's L1 does not know
        ptrs = slots + (part * SPLIT + i) * SIZE + inside
        theirs = gl.load(ptrs, mask=part != i, other=0, cache_modifier=".cg")
        total += gl.where(part == i, own, theirs)
    # the last to have seen all parts leaves the counter as it was
    if gl.atomic_add(counter, 1, sem="relaxed") == 2 * SPLIT - 1:
        gl.store(counter, 0)
    return _from_lines(total, sums.shape[0], LAYOUT)


@gluon.jit
def reduce_in_last_arriver(sums, place, part, partials_ptr, counters_ptr, SPLIT: gl.constexpr):
    """The sums of all parts in order and True for the last part to come; for others False.

    `place` as in `meet`. No part waits for another, so they need not run at once.
    """
    LAYOUT: gl.constexpr = sums.type.layout
    ROWS: gl.constexpr = sums.shape[0]
    lines = _lines(sums)
    LINES: gl.constexpr = lines.type.layout
    SIZE: gl.constexpr = lines.shape[0] * lines.shape[1]
    AT_ONCE: gl.constexpr = max(1, NUMBERS_AT_ONCE // SIZE)
    inside = _inside(lines)
    slots = partials_ptr + place * (SPLIT * SIZE)
    gl.store(slots + part * SIZE + inside, lines)
    # every thread's sums are out before one thread counts the warpgroup in
    barrier()
    last = gl.atomic_add(counters_ptr + place, 1, sem="acq_rel") == SPLIT - 1
    if last:
        # in order, so the bits do not depend on who came last
        total = gl.zeros(lines.shape, lines.dtype, LINES)
        for first in gl.static_range(0, SPLIT, AT_ONCE):
            parts = ()
            for i in gl.static_range(first, min(first + AT_ONCE, SPLIT)):
                # .cg: as in `meet`
                parts += (gl.load(slots + i * SIZE + inside, cache_modifier=".cg"),)
            for i in gl.static_range(len(parts)):
                total += parts[i]
        gl.store(counters_ptr + place, 0)
        sums = _from_lines(total, ROWS, LAYOUT)
    return sums, last
