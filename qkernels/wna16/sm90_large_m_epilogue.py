"""The epilogue of sm90_large_m.py, in Gluon: bias, rounding and TMA stores of sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from qkernels.gpu.gluon_compat import tma_store
from qkernels.gpu.registers import split_columns


@gluon.jit
def epilogue(gemm, buffers, sums, m, n, CONSUMER: gl.constexpr):
    """A consumer's sums [64 outputs, rows] to y[m:, n : n + 64], one store tile at a time.

    A store tile goes through shared memory: the next of the consumer's store_stages buffers.
    """
    BUFFERS: gl.constexpr = gemm.CONFIG.store_stages
    y = gemm.y
    ROWS: gl.constexpr = y.block_type.shape[0]
    if gemm.NUMERICS.has_bias:
        row = n + gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
        # rows after the last output are not stored, whatever their bias
        sums += gl.load(gemm.bias_ptr + gl.minimum(row, gemm.N - 1)).to(gl.float32)[:, None]
    store_tiles = split_columns(sums, sums.shape[1] // ROWS)
    for j in gl.static_range(sums.shape[1] // ROWS):
        # the last TMA store from this buffer has read it
        tma.store_wait(BUFFERS - 1)
        buffer = buffers.index(CONSUMER * BUFFERS + j % BUFFERS)
        buffer.permute((1, 0)).store(store_tiles[j].to(y.dtype))
        fence_async_shared()
        tma_store(y, [m + j * ROWS, n], buffer)
