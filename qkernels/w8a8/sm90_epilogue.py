"""What becomes of a warpgroup's sums in w8a8/sm90.py, in Gluon: scaled, rounded once, stored.

`pointers`, `sizes`, `rings` and `operands` are that kernel's. A piece is TILE.store_width columns
of a warpgroup's rows of the left operand. Beyond the edges, where nothing is stored, factors are
those of the last row or output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from qkernels.gpu.gluon_compat import reshaped, tma_store
from qkernels.gpu.registers import split_columns


@gluon.jit
def factors_ahead(
    pointers,
    sizes,
    row,
    column,
    TILE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCKS: gl.constexpr,
    layout: gl.constexpr,
):
    """Of a warpgroup's result: scales and bias of its rows, and scales and biases of its columns.

    Those of columns are a tensor for each piece, in the registers that need them; or with
    TILE.factors_in_shared one for all columns, in few registers.
    """
    input_scales_ptr, scales_ptr, bias_ptr, _, _, _, _ = pointers
    M, N, _, _, _ = sizes
    WEIGHT_LEFT: gl.constexpr = TILE.weight_left
    WIDTH: gl.constexpr = TILE.share if TILE.factors_in_shared else TILE.store_width
    if TILE.factors_in_shared:
        across: gl.constexpr = gl.BlockedLayout([max(1, WIDTH // 128)], [32], [4], [0])
    else:
        across: gl.constexpr = gl.SliceLayout(0, layout)
    rows = row + gl.arange(0, TILE.part, gl.SliceLayout(1, layout))
    rows = gl.minimum(rows, (N if WEIGHT_LEFT else M) - 1)
    row_scales, row_bias, column_scales, column_biases = (), (), (), ()
    if not BLOCKS:
        row_scales = gl.load((scales_ptr if WEIGHT_LEFT else input_scales_ptr) + rows)
    if HAS_BIAS and WEIGHT_LEFT:
        row_bias = gl.load(bias_ptr + rows)
    for j in gl.static_range(TILE.share // WIDTH):
        columns = column + j * WIDTH + gl.arange(0, WIDTH, across)
        columns = gl.minimum(columns, (M if WEIGHT_LEFT else N) - 1)
        if not BLOCKS:
            ptr = input_scales_ptr if WEIGHT_LEFT else scales_ptr
            column_scales += (gl.load(ptr + columns),)
        if HAS_BIAS and not WEIGHT_LEFT:
            column_biases += (gl.load(bias_ptr + columns),)
    return row_scales, row_bias, column_scales, column_biases


@gluon.jit
def _of_piece(of_columns, buf, j: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr):
    """A factor of the columns of piece j, as one row."""
    WIDTH: gl.constexpr = TILE.store_width
    if TILE.factors_in_shared:
        of_piece = buf.slice(j * WIDTH, WIDTH).load(gl.SliceLayout(0, layout))
    else:
        of_piece = of_columns[j].to(gl.float32)
    return gl.expand_dims(of_piece, 0)


@gluon.jit
def _indices_of_piece(row, column, M, N, TILE: gl.constexpr, layout: gl.constexpr):
    """(m, n) of a piece."""
    rows = row + gl.arange(0, TILE.part, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, TILE.store_width, gl.SliceLayout(0, layout))
    m, n = (columns, rows) if TILE.weight_left else (rows, columns)
    return gl.minimum(m, M - 1), gl.minimum(n, N - 1)


@gluon.jit
def store(
    operands,
    rings,
    pointers,
    sizes,
    sums,
    factors,
    row,
    column,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Sums times both scales, plus bias, rounded once, through shared memory by bulk copies."""
    _, _, y = operands
    _, _, y_bufs, factor_bufs, _, _ = rings
    _, _, _, zeros_ptr, weight_sums_ptr, _, _ = pointers
    M, N, _, _, _ = sizes
    row_scales, row_bias, column_scales, column_biases = factors
    STORES: gl.constexpr = TILE.stores
    WEIGHT_LEFT: gl.constexpr = TILE.weight_left
    WIDTH: gl.constexpr = TILE.store_width
    COUNT: gl.constexpr = TILE.share // WIDTH
    PART: gl.constexpr = TILE.part
    Y_LAYOUT: gl.constexpr = y.layout
    pieces = split_columns(sums, COUNT)
    M_AXIS: gl.constexpr = 0 if WEIGHT_LEFT else 1
    layout: gl.constexpr = pieces[0].type.layout
    scales_buf = factor_bufs.index(WHICH * TILE.column_factors)
    bias_buf = factor_bufs.index((WHICH + 1) * TILE.column_factors - 1)
    if TILE.factors_in_shared:
        if not BLOCKS:
            scales_buf.store(column_scales[0])
        if HAS_BIAS and not WEIGHT_LEFT:
            bias_buf.store(column_biases[0].to(gl.float32))
    for j in gl.static_range(COUNT):
        piece = pieces[j]
        if HAS_ZEROS:
            # sum of (code - zero) * weight code, still exact
            m, n = _indices_of_piece(row, column + j * WIDTH, M, N, TILE, layout)
            zeros = gl.expand_dims(gl.load(zeros_ptr + m), M_AXIS)
            piece = piece - zeros * gl.expand_dims(gl.load(weight_sums_ptr + n), 1 - M_AXIS)
        result = piece.to(gl.float32)
        if not BLOCKS:
            of_columns = _of_piece(column_scales, scales_buf, j, TILE, layout)
            of_rows = gl.expand_dims(row_scales, 1)
            # x's scale first: the portable body's order
            result = result * (of_columns if WEIGHT_LEFT else of_rows)
            result = result * (of_rows if WEIGHT_LEFT else of_columns)
        if HAS_BIAS:
            if WEIGHT_LEFT:
                result += gl.expand_dims(row_bias, 1).to(gl.float32)
            else:
                result += _of_piece(column_biases, bias_buf, j, TILE, layout)
        buf = y_bufs.index(WHICH * STORES + j % STORES)
        # the copy out of this buffer that was started STORES pieces ago has read it
        tma.store_wait(STORES - 1)
        if WEIGHT_LEFT:
            buf.permute((1, 0)).store(result.to(y.dtype))
        else:
            buf.store(result.to(y.dtype))
        fence_async_shared()
        if TILE.idle_rows:
            of_part = reshaped(buf, [1, WIDTH, PART], Y_LAYOUT)
            tma_store(y, [row // TILE.part_rows, column + j * WIDTH, 0], of_part)
        elif WEIGHT_LEFT:
            tma_store(y, [column + j * WIDTH, row], buf)
        else:
            tma_store(y, [row, column + j * WIDTH], buf)
