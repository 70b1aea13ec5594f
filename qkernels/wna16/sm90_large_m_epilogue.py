"""How a warpgroup's sums [64 outputs, rows] are stored, in Gluon. Legend: N outputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from qkernels.gpu.gluon_compat import tma_store
from qkernels.gpu.registers import split_columns


@gluon.jit
def store(
    sums,
    bias_ptr,
    y,
    bufs,
    which,
    m,
    n,
    N,
    HAS_BIAS: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """Plus bias, rounded, to y[m:, n : n + 64] through shared memory, some rows at a time.

    Buffers which * BUFFERS and those after it are this warpgroup's, and take turns.
    """
    ROWS: gl.constexpr = y.block_type.shape[0]
    if HAS_BIAS:
        row = n + gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
        # beyond the edge nothing is stored; any bias will do there
        sums += gl.load(bias_ptr + gl.minimum(row, N - 1)).to(gl.float32)[:, None]
    pieces = split_columns(sums, sums.shape[1] // ROWS)
    for j in gl.static_range(sums.shape[1] // ROWS):
        # the last copy out of this buffer has read it
        tma.store_wait(BUFFERS - 1)
        buf = bufs.index(which * BUFFERS + j % BUFFERS)
        buf.permute((1, 0)).store(pieces[j].to(y.dtype))
        fence_async_shared()
        tma_store(y, [m + j * ROWS, n], buf)
