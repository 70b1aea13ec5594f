"""Split-K reduction of warpgroup accumulators through the L2, in Gluon.

Each split sums over a range of K. The consumer warpgroups that hold the same outputs in all SPLIT
splits exchange their partial sums in one slot of the workspace; `slot` is its index.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.gluon_compat import barrier
from qkernels.gpu.registers import split_columns

SUMS_IN_FLIGHT = gl.constexpr(64 * 128)  # partial sums that a warpgroup loads at the same time


@gluon.jit
def _to_lines(sums):
    """Reshape an accumulator [64 R, C] to [R C / 8, 512]: four values of a thread are adjacent."""
    R: gl.constexpr = sums.shape[0] // 64
    C: gl.constexpr = sums.shape[1] // 8
    # rows: R, 4 warps, 2 halves, 8 lines; columns: C / 8, 4 lanes, 2
    values = sums.reshape([R, 4, 2, 8, C, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6])
    return values.reshape([R * C, 512])


@gluon.jit
def _from_lines(lines, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    R: gl.constexpr = ROWS // 64
    C: gl.constexpr = lines.shape[0] // R
    values = lines.reshape([R, C, 4, 8, 4, 2, 2]).permute([0, 2, 5, 3, 1, 4, 6])
    return gl.convert_layout(values.reshape([ROWS, C * 8]), LAYOUT, assert_trivial=True)


@gluon.jit
def _offsets(lines):
    """Return the offsets in memory of the values of `_to_lines`."""
    L: gl.constexpr = lines.type.layout
    row = gl.arange(0, lines.shape[0], gl.SliceLayout(1, L))
    column = gl.arange(0, 512, gl.SliceLayout(0, L))
    return row[:, None] * 512 + column[None, :]


@gluon.jit
def accumulate(sums, total_ptr, pred, STORE: gl.constexpr):
    """Add the warpgroup's total at `total_ptr`, if `pred`, to sums. Return the result.

    STORE: also write the result to `total_ptr`. Each thread reads only values that it wrote.
    """
    LAYOUT: gl.constexpr = sums.type.layout
    lines = _to_lines(sums)
    ptrs = total_ptr + _offsets(lines)
    lines = gl.load(ptrs, mask=pred, other=0) + lines
    if STORE:
        gl.store(ptrs, lines)
    return _from_lines(lines, sums.shape[0], LAYOUT)


@gluon.jit
def reduce_scatter(sums, slot, split, partials_ptr, counters_ptr, SPLIT: gl.constexpr):
    """Return the sum of all splits, in order, for this split's columns: [rows, columns / SPLIT].

    Each split stores its sums of the other splits' columns, then waits until the others have stored
    their sums of its columns. So all splits of a tile must be resident at the same time.
    """
    shares = split_columns(sums, SPLIT)
    SIZE: gl.constexpr = shares[0].shape[0] * shares[0].shape[1]
    LAYOUT: gl.constexpr = shares[0].type.layout
    lines = (_to_lines(shares[0]),)
    for i in gl.static_range(1, SPLIT):
        lines += (_to_lines(shares[i]),)
    offsets = _offsets(lines[0])
    slot_ptr = partials_ptr + slot * (SPLIT * SPLIT * SIZE)  # [columns' owner, stored by, SIZE]
    own = lines[0]
    for i in gl.static_range(SPLIT):
        if split == i:
            own = lines[i]
        else:
            gl.store(slot_ptr + (i * SPLIT + split) * SIZE + offsets, lines[i])
    # every thread's sums are stored before one thread increments the counter
    barrier()
    counter = counters_ptr + slot
    arrived = gl.atomic_add(counter, 1, sem="acq_rel") + 1
    while arrived < SPLIT:
        arrived = gl.atomic_add(counter, 0, sem="acquire")
    L: gl.constexpr = own.type.layout
    total = gl.zeros(own.shape, own.dtype, L)
    for i in gl.static_range(SPLIT):
        # .cg: other SMs wrote these, and this SM's L1 is not coherent with them
        ptrs = slot_ptr + (split * SPLIT + i) * SIZE + offsets
        theirs = gl.load(ptrs, mask=split != i, other=0, cache_modifier=".cg")
        total += gl.where(split == i, own, theirs)
    # the last split to leave resets the counter
    if gl.atomic_add(counter, 1, sem="relaxed") == 2 * SPLIT - 1:
        gl.store(counter, 0)
    return _from_lines(total, sums.shape[0], LAYOUT)


@gluon.jit
def reduce_in_last_arriver(sums, slot, split, partials_ptr, counters_ptr, SPLIT: gl.constexpr):
    """Return (sum of all splits in order, True) in the last split to arrive, else (_, False).

    No split waits for another, so the splits need not be resident at the same time.
    """
    LAYOUT: gl.constexpr = sums.type.layout
    ROWS: gl.constexpr = sums.shape[0]
    lines = _to_lines(sums)
    LINES: gl.constexpr = lines.type.layout
    SIZE: gl.constexpr = lines.shape[0] * lines.shape[1]
    SPLITS_IN_FLIGHT: gl.constexpr = max(1, SUMS_IN_FLIGHT // SIZE)
    offsets = _offsets(lines)
    slot_ptr = partials_ptr + slot * (SPLIT * SIZE)
    gl.store(slot_ptr + split * SIZE + offsets, lines)
    # every thread's sums are stored before one thread increments the counter
    barrier()
    last = gl.atomic_add(counters_ptr + slot, 1, sem="acq_rel") == SPLIT - 1
    if last:
        # in order, so that the bits do not depend on which split arrived last
        total = gl.zeros(lines.shape, lines.dtype, LINES)
        for first in gl.static_range(0, SPLIT, SPLITS_IN_FLIGHT):
            partials = ()
            for i in gl.static_range(first, min(first + SPLITS_IN_FLIGHT, SPLIT)):
                # .cg: as in reduce_scatter
                partials += (gl.load(slot_ptr + i * SIZE + offsets, cache_modifier=".cg"),)
            for i in gl.static_range(len(partials)):
                total += partials[i]
        gl.store(counters_ptr + slot, 0)
        sums = _from_lines(total, ROWS, LAYOUT)
    return sums, last
