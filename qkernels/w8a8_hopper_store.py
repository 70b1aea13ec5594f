"""What becomes of a warpgroup's sums in w8a8_hopper.py, in Gluon: scaled, rounded once, stored.

`pointers`, `sizes`, `rings` and `operands` are that kernel's. A piece is TILE.store_width columns
of a warpgroup's rows of the left operand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from qkernels.gluon_names import store_box
from qkernels.gluon_registers import pieces_of


@gluon.jit
def factors_of_piece(
    pointers,
    sizes,
    row,
    column,
    TILE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCKS: gl.constexpr,
    layout: gl.constexpr,
):
    """Of one piece of the result (scales of x, scales of the weight, bias), each if there is any.

    As columns or rows, which spread over the piece.
    """
    input_scales_ptr, scales_ptr, bias_ptr, _, _, _, _ = pointers
    M, N, _, _, _ = sizes
    M_AXIS: gl.constexpr = 0 if TILE.weight_left else 1
    m, n = _indices_of_piece(row, column, M, N, TILE, layout)
    input_scales, scales, bias = (), (), ()
    if not BLOCKS:
        input_scales = gl.expand_dims(gl.load(input_scales_ptr + m), M_AXIS)
        scales = gl.expand_dims(gl.load(scales_ptr + n), 1 - M_AXIS)
    if HAS_BIAS:
        bias = gl.expand_dims(gl.load(bias_ptr + n), 1 - M_AXIS)
    return input_scales, scales, bias


@gluon.jit
def _indices_of_piece(row, column, M, N, TILE: gl.constexpr, layout: gl.constexpr):
    """(m, n) of a piece; beyond the edge, where nothing is stored, the last there are."""
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
    _, _, y_bufs, _, _ = rings
    _, _, _, zeros_ptr, weight_sums_ptr, _, _ = pointers
    M, N, _, _, _ = sizes
    BR: gl.constexpr = TILE.block_right
    STORES: gl.constexpr = TILE.stores
    WEIGHT_LEFT: gl.constexpr = TILE.weight_left
    WIDTH: gl.constexpr = TILE.store_width
    pieces = pieces_of(sums, BR // WIDTH)
    M_AXIS: gl.constexpr = 0 if WEIGHT_LEFT else 1
    layout: gl.constexpr = pieces[0].type.layout
    for j in gl.static_range(BR // WIDTH):
        piece = pieces[j]
        if HAS_ZEROS:
            # sum of (code - zero) * weight code, still exact
            m, n = _indices_of_piece(row, column + j * WIDTH, M, N, TILE, layout)
            zeros = gl.expand_dims(gl.load(zeros_ptr + m), M_AXIS)
            piece = piece - zeros * gl.expand_dims(gl.load(weight_sums_ptr + n), 1 - M_AXIS)
        if TILE.early_factors:
            input_scales, scales, bias = factors[j]
        else:
            input_scales, scales, bias = factors_of_piece(
                pointers, sizes, row, column + j * WIDTH, TILE, HAS_BIAS, BLOCKS, layout
            )
        result = piece.to(gl.float32)
        if not BLOCKS:
            result = result * input_scales * scales
        if HAS_BIAS:
            result = result + bias.to(gl.float32)
        buf = y_bufs.index(WHICH * STORES + j % STORES)
        # the copy out of this buffer that was started STORES pieces ago has read it
        tma.store_wait(STORES - 1)
        if WEIGHT_LEFT:
            buf.permute((1, 0)).store(result.to(y.dtype))
        else:
            buf.store(result.to(y.dtype))
        fence_async_shared()
        if WEIGHT_LEFT:
            store_box(y, [column + j * WIDTH, row], buf)
        else:
            store_box(y, [row, column + j * WIDTH], buf)
