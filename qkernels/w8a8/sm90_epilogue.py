"""The epilogue of w8a8/sm90.py, in Gluon: scale sums, round once and store by TMA.

A store tile is CONFIG.store_width columns of a consumer's rows of A. Rows and columns beyond the
edges are not stored; for them, the scales and biases of the last row or output are read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from qkernels.gpu.gluon_compat import reshaped, tma_store
from qkernels.gpu.registers import split_columns
from qkernels.w8a8.sm90_structs import EpilogueVectors


@gluon.jit
def load_vectors(gemm, row, column, layout: gl.constexpr):
    """Load the scales and biases of a consumer's result. layout: that of a store tile."""
    CONFIG: gl.constexpr = gemm.CONFIG
    WEIGHT_IS_A: gl.constexpr = CONFIG.weight_is_a
    IN_SHARED: gl.constexpr = CONFIG.column_vectors_in_shared
    WIDTH: gl.constexpr = CONFIG.stored_columns if IN_SHARED else CONFIG.store_width
    if IN_SHARED:
        across: gl.constexpr = gl.BlockedLayout([max(1, WIDTH // 128)], [32], [4], [0])
    else:
        across: gl.constexpr = gl.SliceLayout(0, layout)
    rows = row + gl.arange(0, CONFIG.consumer_rows, gl.SliceLayout(1, layout))
    rows = gl.minimum(rows, (gemm.N if WEIGHT_IS_A else gemm.M) - 1)
    row_scales, row_bias, column_scales, column_biases = None, None, (), ()
    if gemm.OUTPUT_SCALES or not (WEIGHT_IS_A or gemm.BLOCKS):
        row_scales = gl.load((gemm.scales_ptr if WEIGHT_IS_A else gemm.input_scales_ptr) + rows)
    if gemm.HAS_BIAS and WEIGHT_IS_A:
        row_bias = gl.load(gemm.bias_ptr + rows)
    for j in gl.static_range(CONFIG.stored_columns // WIDTH):
        columns = column + j * WIDTH + gl.arange(0, WIDTH, across)
        columns = gl.minimum(columns, (gemm.M if WEIGHT_IS_A else gemm.N) - 1)
        if not gemm.BLOCKS:
            ptr = gemm.input_scales_ptr if WEIGHT_IS_A else gemm.scales_ptr
            column_scales += (gl.load(ptr + columns),)
        if gemm.HAS_BIAS and not WEIGHT_IS_A:
            column_biases += (gl.load(gemm.bias_ptr + columns),)
    return EpilogueVectors(
        row_scales=row_scales,
        row_bias=row_bias,
        column_scales=column_scales,
        column_biases=column_biases,
    )


@gluon.jit
def _across(vectors, buffer, j: gl.constexpr, CONFIG: gl.constexpr, layout: gl.constexpr):
    """Return the scales or biases of store tile j's columns, as one row."""
    WIDTH: gl.constexpr = CONFIG.store_width
    if CONFIG.column_vectors_in_shared:
        vector = buffer.slice(j * WIDTH, WIDTH).load(gl.SliceLayout(0, layout))
    else:
        vector = vectors[j].to(gl.float32)
    return gl.expand_dims(vector, 0)


@gluon.jit
def epilogue(gemm, buffers, sums, vectors, row, column, CONSUMER: gl.constexpr):
    """Store sums times both scales, plus bias, rounded once, through shared memory to y."""
    CONFIG: gl.constexpr = gemm.CONFIG
    STORE_STAGES: gl.constexpr = CONFIG.store_stages
    WEIGHT_IS_A: gl.constexpr = CONFIG.weight_is_a
    ROWS: gl.constexpr = CONFIG.consumer_rows
    WIDTH: gl.constexpr = CONFIG.store_width
    STORE_TILES: gl.constexpr = CONFIG.stored_columns // WIDTH
    Y_LAYOUT: gl.constexpr = gemm.y.layout
    tiles = split_columns(sums, STORE_TILES)
    layout: gl.constexpr = tiles[0].type.layout
    scales_buffer = buffers.column_vectors.index(CONSUMER * CONFIG.num_column_vectors)
    bias_buffer = buffers.column_vectors.index((CONSUMER + 1) * CONFIG.num_column_vectors - 1)
    if CONFIG.column_vectors_in_shared:
        if not gemm.BLOCKS:
            scales_buffer.store(vectors.column_scales[0])
        if gemm.HAS_BIAS and not WEIGHT_IS_A:
            bias_buffer.store(vectors.column_biases[0].to(gl.float32))
    for j in gl.static_range(STORE_TILES):
        tile = tiles[j]
        result = tile.to(gl.float32)
        if not gemm.BLOCKS:
            column_scales = _across(vectors.column_scales, scales_buffer, j, CONFIG, layout)
            # x's scale first, as in triton_gemm.py
            if WEIGHT_IS_A:
                result = result * column_scales
                if gemm.OUTPUT_SCALES:
                    result = result * gl.expand_dims(vectors.row_scales, 1)
            else:
                result = result * gl.expand_dims(vectors.row_scales, 1) * column_scales
        if gemm.HAS_BIAS:
            if WEIGHT_IS_A:
                result += gl.expand_dims(vectors.row_bias, 1).to(gl.float32)
            else:
                result += _across(vectors.column_biases, bias_buffer, j, CONFIG, layout)
        buffer = buffers.y.index(CONSUMER * STORE_STAGES + j % STORE_STAGES)
        # wait until the TMA store that started STORE_STAGES tiles ago has read this buffer
        tma.store_wait(STORE_STAGES - 1)
        if WEIGHT_IS_A:
            buffer.permute((1, 0)).store(result.to(gemm.y.dtype))
        else:
            buffer.store(result.to(gemm.y.dtype))
        fence_async_shared()
        if CONFIG.idle_rows:
            of_consumer = reshaped(buffer, [1, WIDTH, ROWS], Y_LAYOUT)
            tma_store(gemm.y, [row // CONFIG.stored_rows, column + j * WIDTH, 0], of_consumer)
        elif WEIGHT_IS_A:
            tma_store(gemm.y, [column + j * WIDTH, row], buffer)
        else:
            tma_store(gemm.y, [row, column + j * WIDTH], buffer)
