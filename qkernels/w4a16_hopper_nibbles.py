"""4-bit codes in words to scaled weights, in Gluon. Moves nothing.

Two codes stand at the same bits of both halves of a word. Masked where they are, they are numbers
already. In bfloat16 bits 0 to 7 alone are that many times 2^-133, and a fused multiply-add with a
power of two takes the zero away. In float16 they are or-ed into 1024. So the codes at bits 0 and 4
need no shift, and those at bits 8 and 12 one for both.

Legend: C words of one row and one t, 32 inputs each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gluon_registers import halves, twice


def _to_bfloat16(mask: int, factor: int) -> gl.constexpr:
    """(code - zero) / 64 and its product with `low` are exact."""
    return gl.constexpr(
        f"{{ .reg .b32 c, f, l; and.b32 c, $1, {mask:#010x}; mov.b32 f, {factor:#010x};"
        " fma.rn.bf16x2 c, c, f, $2; mul.bf16x2 l, c, $4; fma.rn.bf16x2 $0, c, $3, l; }"
    )


def _to_float16(mask: int, factor: int) -> gl.constexpr:
    return gl.constexpr(
        f"{{ .reg .b32 c, f, m; mov.b32 m, 0x64006400; lop3.b32 c, $1, {mask:#010x}, m, 0xEA;"
        f" mov.b32 f, {factor:#010x}; fma.rn.f16x2 c, c, f, $2; mul.f16x2 $0, c, $3; }}"
    )


_BFLOAT16_AT_0 = _to_bfloat16(0x000F000F, 0x7F007F00)  # 2^127
_BFLOAT16_AT_4 = _to_bfloat16(0x00F000F0, 0x7D007D00)  # 2^123
_FLOAT16_AT_0 = _to_float16(0x000F000F, 0x3C003C00)  # 1
_FLOAT16_AT_4 = _to_float16(0x00F000F0, 0x2C002C00)  # 1 / 16


@gluon.jit
def nibble_factors(scale, offset, DTYPE: gl.constexpr):
    """(less of codes at bit 0, of codes at bit 4, high, low) of rows [64], as words [64, 1].

    The scale is high + low: a float16 one is a bfloat16 number and a rest of three bits.
    """
    exact = scale.to(gl.float32)
    less = offset.to(gl.float32)
    if DTYPE.is_fp16():
        high = twice(exact.to(DTYPE))
        low = high
        less_0 = twice((-less).to(DTYPE))
        less_4 = twice((960 - less).to(DTYPE))
    else:
        high, low = gl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .f32 h; cvt.rn.bf16x2.f32 $0, $2, $2; shl.b32 t, $0, 16;"
            " mov.b32 h, t; sub.f32 h, $2, h; cvt.rn.bf16x2.f32 $1, h, h; }",
            "=&r,=r,r",
            [exact * 64],
            (gl.int32, gl.int32),
            True,
            1,
        )
        less_0 = twice(((128 - less) / 64).to(DTYPE))
        less_4 = less_0
    return less_0[:, None], less_4[:, None], high[:, None], low[:, None]


@gluon.jit
def _weights(words, less, high, low, ASSEMBLY: gl.constexpr):
    """The codes under the mask, less their zero, times (high + low), rounded once."""
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,r,r,r,r", [words, less, high, low], gl.int32, True, 1
    )


@gluon.jit
def unpack_nibbles(words, factors, DTYPE: gl.constexpr):
    """Words [64, 4 C] to weights [64, 32 C] in the order of the inputs."""
    less_0, less_4, high, low = factors
    C: gl.constexpr = words.shape[1] // 4
    AT_0: gl.constexpr = _FLOAT16_AT_0 if DTYPE.is_fp16() else _BFLOAT16_AT_0
    AT_4: gl.constexpr = _FLOAT16_AT_4 if DTYPE.is_fp16() else _BFLOAT16_AT_4
    p0 = _weights(words, less_0, high, low, AT_0)
    p1 = _weights(words, less_4, high, low, AT_4)
    p2 = _weights(words >> 8, less_0, high, low, AT_0)
    p3 = _weights(words >> 8, less_4, high, low, AT_4)
    i0 = gl.join(halves(p0, DTYPE), halves(p1, DTYPE))
    i1 = gl.join(halves(p2, DTYPE), halves(p3, DTYPE))
    # [64, t, c, e, h, i] -> [64, c, i, h, t, e]
    values = gl.join(i0, i1).reshape([64, 4, C, 2, 2, 2]).permute([0, 2, 5, 4, 1, 3])
    return values.reshape([64, 32 * C])
