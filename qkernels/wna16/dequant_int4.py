"""4-bit codes in words to weights, scaled or not, in Gluon. Moves nothing.

Two codes stand at the same bits of both halves of a word. Masked where they are, they are numbers
already. In bfloat16 bits 0 to 7 alone are that many times 2^-133, and a fused multiply-add with a
power of two takes the zero away. In float16 they are or-ed into 1024. So the codes at bits 0 and 4
need no shift, and those at bits 8 and 12 one for both.

Legend: C words of one row and one t, 32 inputs each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.registers import pack_x2, unpack_x2

BFLOAT16_CODES = gl.constexpr(1 / 64)  # what exact_codes multiplies codes of bfloat16 by


@gluon.constexpr_function
def _assembly(is_float16, at, scaled):
    """The codes at bit `at` (0 or 4) of both halves of $1, less $2. Exact, and so in $0.

    Scaled: times $3 + $4, rounded once, since the product with $4 is exact.
    """
    mask = {0: "0x000F000F", 4: "0x00F000F0"}[at]
    if is_float16:
        factor = {0: "0x3C003C00", 4: "0x2C002C00"}[at]  # 1, 1 / 16
        codes = f"mov.b32 x, 0x64006400; lop3.b32 c, $1, {mask}, x, 0xEA;"
        less, scale = "fma.rn.f16x2", "mul.f16x2 $0, c, $3;"
    else:
        factor = {0: "0x7F007F00", 4: "0x7D007D00"}[at]  # 2^127, 2^123
        codes = f"and.b32 c, $1, {mask};"
        less, scale = "fma.rn.bf16x2", "mul.bf16x2 x, c, $4; fma.rn.bf16x2 $0, c, $3, x;"
    to, scale = ("c", scale) if scaled else ("$0", "")
    return f"{{ .reg .b32 c, f, x; {codes} mov.b32 f, {factor}; {less} {to}, c, f, $2; {scale} }}"


@gluon.jit
def zeros_to_subtract(offset, DTYPE: gl.constexpr):
    """Rows' offsets [64] to what (codes at bit 0, codes at bit 4) subtract, as words [64, 1]."""
    less = offset.to(gl.float32)
    if DTYPE.is_fp16():
        return pack_x2((-less).to(DTYPE))[:, None], pack_x2((960 - less).to(DTYPE))[:, None]
    else:
        both = pack_x2(((128 - less) * BFLOAT16_CODES).to(DTYPE))[:, None]
        return both, both


@gluon.jit
def codes_in_full(scale, DTYPE: gl.constexpr):
    """The scale of what `exact_codes` made, as it should be."""
    if DTYPE.is_fp16():
        return scale
    else:
        return scale * (1 / BFLOAT16_CODES)


@gluon.jit
def exact_codes(words, less, DTYPE: gl.constexpr):
    """Words [64, 4 C] to codes less their zero, [64, 32 C] in the order of the inputs.

    `less` as of zeros_to_subtract. In bfloat16 they are BFLOAT16_CODES of what they should be.
    """
    AT_0: gl.constexpr = _assembly(DTYPE.is_fp16(), 0, False)
    AT_4: gl.constexpr = _assembly(DTYPE.is_fp16(), 4, False)
    less_0, less_4 = less
    p0 = _codes(words, less_0, AT_0)
    p1 = _codes(words, less_4, AT_4)
    p2 = _codes(words >> 8, less_0, AT_0)
    p3 = _codes(words >> 8, less_4, AT_4)
    return _in_order(p0, p1, p2, p3, DTYPE)


@gluon.jit
def _codes(words, less, ASSEMBLY: gl.constexpr):
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [words, less], gl.int32, True, 1)


@gluon.jit
def _in_order(p0, p1, p2, p3, DTYPE: gl.constexpr):
    """Pairs [64, 4 C] of codes at bits 0, 4, 8 and 12 to [64, 32 C] in the order of the inputs."""
    C: gl.constexpr = p0.shape[1] // 4
    i0 = gl.join(unpack_x2(p0, DTYPE), unpack_x2(p1, DTYPE))
    i1 = gl.join(unpack_x2(p2, DTYPE), unpack_x2(p3, DTYPE))
    # [64, t, c, e, h, i] -> [64, c, i, h, t, e]
    values = gl.join(i0, i1).reshape([64, 4, C, 2, 2, 2]).permute([0, 2, 5, 4, 1, 3])
    return values.reshape([64, 32 * C])


@gluon.jit
def nibble_factors(scale, offset, DTYPE: gl.constexpr):
    """(less of codes at bit 0, of codes at bit 4, high, low) of rows [64], as words [64, 1].

    The scale is high + low: a float16 one is a bfloat16 number and a rest of three bits.
    """
    exact = scale.to(gl.float32)
    less_0, less_4 = zeros_to_subtract(offset, DTYPE)
    if DTYPE.is_fp16():
        high = pack_x2(exact.to(DTYPE))
        low = high
    else:
        high, low = gl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .f32 h; cvt.rn.bf16x2.f32 $0, $2, $2; shl.b32 t, $0, 16;"
            " mov.b32 h, t; sub.f32 h, $2, h; cvt.rn.bf16x2.f32 $1, h, h; }",
            "=&r,=r,r",
            [codes_in_full(exact, DTYPE)],
            (gl.int32, gl.int32),
            True,
            1,
        )
    return less_0, less_4, high[:, None], low[:, None]


@gluon.jit
def _weights(words, less, high, low, ASSEMBLY: gl.constexpr):
    """The codes under the mask, less their zero, times (high + low), rounded once."""
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,r,r,r,r", [words, less, high, low], gl.int32, True, 1
    )


@gluon.jit
def unpack_nibbles(words, factors, DTYPE: gl.constexpr):
    """Words [64, 4 C] to weights [64, 32 C] in the order of the inputs."""
    AT_0: gl.constexpr = _assembly(DTYPE.is_fp16(), 0, True)
    AT_4: gl.constexpr = _assembly(DTYPE.is_fp16(), 4, True)
    less_0, less_4, high, low = factors
    p0 = _weights(words, less_0, high, low, AT_0)
    p1 = _weights(words, less_4, high, low, AT_4)
    p2 = _weights(words >> 8, less_0, high, low, AT_0)
    p3 = _weights(words >> 8, less_4, high, low, AT_4)
    return _in_order(p0, p1, p2, p3, DTYPE)
