"""4-bit codes to 16-bit weights, scaled or not, within each thread, in Gluon.

A packed word has two codes at the same bits of its two halves. A mask alone makes them numbers: in
bfloat16 a code in bits 0 to 7 is that many times 2^-133, and a fused multiply-add with a power of
two subtracts the zero point; in float16 it is or-ed into 1024. So the codes at bits 0 and 4 need no
shift, and those at bits 8 and 12 share one.

Legend: C packed words of one row and one t, 32 inputs each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.registers import pack_x2, unpack_x2

BFLOAT16_CODE_FACTOR = gl.constexpr(1 / 64)  # in the bfloat16 values of codes_minus_zeros


@gluon.constexpr_function
def _ptx(is_float16, bit, scaled):
    """To $0: the codes at `bit` (0 or 4) of both halves of $1, minus $2, exactly.

    scaled: times $3 + $4, rounded once, since the product with $4 is exact.
    """
    mask = {0: "0x000F000F", 4: "0x00F000F0"}[bit]
    if is_float16:
        factor = {0: "0x3C003C00", 4: "0x2C002C00"}[bit]  # 1, 1 / 16
        codes = f"mov.b32 x, 0x64006400; lop3.b32 c, $1, {mask}, x, 0xEA;"
        fma, scale = "fma.rn.f16x2", "mul.f16x2 $0, c, $3;"
    else:
        factor = {0: "0x7F007F00", 4: "0x7D007D00"}[bit]  # 2^127, 2^123
        codes = f"and.b32 c, $1, {mask};"
        fma, scale = "fma.rn.bf16x2", "mul.bf16x2 x, c, $4; fma.rn.bf16x2 $0, c, $3, x;"
    to, scale = ("c", scale) if scaled else ("$0", "")
    return f"{{ .reg .b32 c, f, x; {codes} mov.b32 f, {factor}; {fma} {to}, c, f, $2; {scale} }}"


@gluon.jit
def zeros_to_subtract(offset, DTYPE: gl.constexpr):
    """Rows' offsets [64] to what is subtracted of codes at (bit 0, bit 4), as words [64, 1]."""
    zero = offset.to(gl.float32)
    if DTYPE.is_fp16():
        return pack_x2((-zero).to(DTYPE))[:, None], pack_x2((960 - zero).to(DTYPE))[:, None]
    else:
        both = pack_x2(((128 - zero) * BFLOAT16_CODE_FACTOR).to(DTYPE))[:, None]
        return both, both


@gluon.jit
def scale_of_codes(scale, DTYPE: gl.constexpr):
    """The scale that the values of codes_minus_zeros are multiplied by."""
    if DTYPE.is_fp16():
        return scale
    else:
        return scale * (1 / BFLOAT16_CODE_FACTOR)


@gluon.jit
def codes_minus_zeros(packed, zeros, DTYPE: gl.constexpr):
    """Packed words [64, 4 C] to codes minus zero points, [64, 32 C] in the order of the inputs.

    `zeros` as from zeros_to_subtract. bfloat16 values are multiplied by BFLOAT16_CODE_FACTOR.
    """
    AT_0: gl.constexpr = _ptx(DTYPE.is_fp16(), 0, False)
    AT_4: gl.constexpr = _ptx(DTYPE.is_fp16(), 4, False)
    zero_0, zero_4 = zeros
    p0 = _codes(packed, zero_0, AT_0)
    p1 = _codes(packed, zero_4, AT_4)
    p2 = _codes(packed >> 8, zero_0, AT_0)
    p3 = _codes(packed >> 8, zero_4, AT_4)
    return _in_order(p0, p1, p2, p3, DTYPE)


@gluon.jit
def _codes(packed, zero, PTX: gl.constexpr):
    return gl.inline_asm_elementwise(PTX, "=r,r,r", [packed, zero], gl.int32, True, 1)


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
    """(zero of codes at bit 0, of codes at bit 4, high, low) of rows [64], as words [64, 1].

    The scale is high + low: a float16 scale is a bfloat16 number plus a remainder of three bits.
    """
    exact = scale.to(gl.float32)
    zero_0, zero_4 = zeros_to_subtract(offset, DTYPE)
    if DTYPE.is_fp16():
        high = pack_x2(exact.to(DTYPE))
        low = high
    else:
        high, low = gl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .f32 h; cvt.rn.bf16x2.f32 $0, $2, $2; shl.b32 t, $0, 16;"
            " mov.b32 h, t; sub.f32 h, $2, h; cvt.rn.bf16x2.f32 $1, h, h; }",
            "=&r,=r,r",
            [scale_of_codes(exact, DTYPE)],
            (gl.int32, gl.int32),
            True,
            1,
        )
    return zero_0, zero_4, high[:, None], low[:, None]


@gluon.jit
def _weights(packed, zero, high, low, PTX: gl.constexpr):
    return gl.inline_asm_elementwise(
        PTX, "=r,r,r,r,r", [packed, zero, high, low], gl.int32, True, 1
    )


@gluon.jit
def unpack_nibbles(packed, factors, DTYPE: gl.constexpr):
    """Packed words [64, 4 C] to weights [64, 32 C] in the order of the inputs."""
    AT_0: gl.constexpr = _ptx(DTYPE.is_fp16(), 0, True)
    AT_4: gl.constexpr = _ptx(DTYPE.is_fp16(), 4, True)
    zero_0, zero_4, high, low = factors
    p0 = _weights(packed, zero_0, high, low, AT_0)
    p1 = _weights(packed, zero_4, high, low, AT_4)
    p2 = _weights(packed >> 8, zero_0, high, low, AT_0)
    p3 = _weights(packed >> 8, zero_4, high, low, AT_4)
    return _in_order(p0, p1, p2, p3, DTYPE)
