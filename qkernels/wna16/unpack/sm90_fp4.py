"""Gluon functions that unpack 4-bit floats to operand A of wgmma in registers.

fp4_layout.py defines the layout of words and scales, dequant.py the layout of registers. A word's
numbers have one scale, or one for the first two pairs and one for the last two. Legend: see
dequant.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.wna16.dequant import for_words, groups_layout, in_order


@gluon.jit
def fp4_scales(row_bytes, i: gl.constexpr, K_SUBTILE: gl.constexpr, FP4: gl.constexpr):
    """Return the scales of a K subtile's words [64, 4 C], each scale twice in a word.

    row_bytes: words [64], each with a row's scale bytes of four groups.
    """
    C: gl.constexpr = K_SUBTILE // 32
    GROUPS: gl.constexpr = gl.SliceLayout(1, groups_layout(C))
    ROWS: gl.constexpr = gl.SliceLayout(1, GROUPS)
    shifts = 8 * (i * C + gl.arange(0, C, gl.SliceLayout(0, GROUPS)))
    rows = gl.convert_layout(row_bytes, ROWS, assert_trivial=True)
    byte = (rows[:, None] >> shifts[None, :]) & 0xFF
    return for_words(byte * FP4.scale_factor + FP4.scale_addend)


@gluon.jit
def unpack_fp4(packed, first, second, FP4: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr):
    """Convert packed words [64, 4 C] of a K subtile to operand A, without the outputs' factors.

    first, second: scales of each word's first 16 inputs, and of its other inputs.
    """
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        FP4.ptx,
        FP4.outputs,
        [packed, first, second],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        True,
        1,
    )
    return gl.convert_layout(in_order(p0, p1, p2, p3, DTYPE), A, assert_trivial=True)
