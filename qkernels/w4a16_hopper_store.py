"""What becomes of a warpgroup's sums [64 outputs, rows], in Gluon: added over parts of K, stored.

Legend: N outputs; SPLIT parts of K.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from qkernels.gluon_names import barrier, store_box
from qkernels.gluon_registers import pieces_of


@gluon.jit
def _lines(sums):
    """Sums [64, BM] as [BM / 8, 512]: four numbers of a thread side by side. Moves nothing."""
    BM: gl.constexpr = sums.shape[1]
    # rows: 4 warps, 2 halves, 8 lines; columns: BM / 8, 4 lanes, 2
    numbers = sums.reshape([4, 2, 8, BM // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return numbers.reshape([BM // 8, 512])


@gluon.jit
def _from_lines(lines, LAYOUT: gl.constexpr):
    BM: gl.constexpr = lines.shape[0] * 8
    numbers = lines.reshape([BM // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(numbers.reshape([64, BM]), LAYOUT, assert_trivial=True)


@gluon.jit
def meet(sums, place, part, partials_ptr, counters_ptr, SPLIT: gl.constexpr):
    """This part's share of the columns, summed over all parts in order: [64, BM / SPLIT].

    `place` numbers the warpgroup's share of a tile. Each part hands the others their columns
    through the L2 and waits for its own. Parts of a tile are blocks side by side and the grid is at
    most one block for each SM, so those that are waited for run.
    """
    SHARE: gl.constexpr = sums.shape[1] // SPLIT
    FLOATS: gl.constexpr = 64 * SHARE
    shares = pieces_of(sums, SPLIT)
    LAYOUT: gl.constexpr = shares[0].type.layout
    lines = (_lines(shares[0]),)
    for i in gl.static_range(1, SPLIT):
        lines += (_lines(shares[i]),)
    L: gl.constexpr = lines[0].type.layout
    row = gl.arange(0, SHARE // 8, gl.SliceLayout(1, L))
    column = gl.arange(0, 512, gl.SliceLayout(0, L))
    inside = row[:, None] * 512 + column[None, :]
    slots = partials_ptr + place * (SPLIT * SPLIT * FLOATS)  # [share, part that wrote it, FLOATS]
    own = lines[0]
    for i in gl.static_range(SPLIT):
        if part == i:
            own = lines[i]
        else:
            gl.store(slots + (i * SPLIT + part) * FLOATS + inside, lines[i])
    # every thread's sums are out before one thread counts the warpgroup in
    barrier()
    counter = counters_ptr + place
    arrived = gl.atomic_add(counter, 1, sem="acq_rel") + 1
    while arrived < SPLIT:
        arrived = gl.atomic_add(counter, 0, sem="acquire")
    total = gl.zeros([SHARE // 8, 512], gl.float32, L)
    for i in gl.static_range(SPLIT):
        # .cg: other SMs wrote these, and this SM's L1 does not know
        ptrs = slots + (part * SPLIT + i) * FLOATS + inside
        theirs = gl.load(ptrs, mask=part != i, other=0.0, cache_modifier=".cg")
        total += gl.where(part == i, own, theirs)
    # the last to have seen all parts leaves the counter as it was
    if gl.atomic_add(counter, 1, sem="relaxed") == 2 * SPLIT - 1:
        gl.store(counter, 0)
    return _from_lines(total, LAYOUT)


@gluon.jit
def store(sums, bias_ptr, y, buf, m, n, N, HAS_BIAS: gl.constexpr):
    """Plus bias, rounded, to y[m:, n : n + 64] through shared memory, some rows at a time."""
    ROWS: gl.constexpr = y.block_type.shape[0]
    if HAS_BIAS:
        row = n + gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
        # beyond the edge nothing is stored; any bias will do there
        sums += gl.load(bias_ptr + gl.minimum(row, N - 1)).to(gl.float32)[:, None]
    pieces = pieces_of(sums, sums.shape[1] // ROWS)
    for j in gl.static_range(sums.shape[1] // ROWS):
        # the copy before has read this memory
        tma.store_wait(0)
        buf.permute((1, 0)).store(pieces[j].to(y.dtype))
        fence_async_shared()
        store_box(y, [m + j * ROWS, n], buf)
