"""8-bit codes to scaled 16-bit weights, within each thread, in Gluon.

In float16 the byte permute that takes two codes out of a word makes both 1024 + code. In bfloat16
the 11 bits of a scale times the 8 bits of a code need float32 and one rounding at the end. A code
at bits 16 to 23 of a float32 is code 2^-133, normal or subnormal. So the scale is multiplied by a
power of two, and the weights keep another one, BFLOAT16_SHRINK, that `dequant.rescale` takes out.

Legend: C packed words of one row and one t, 16 inputs each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.registers import pack_x2, unpack_x2

# The factor of bfloat16 weights: with it float16's largest scale times 2^109 is still a float32.
BFLOAT16_SHRINK = gl.constexpr(2.0**-24)
_SCALE_FACTOR = gl.constexpr(2.0 ** (133 - 24))
_ZERO_OF_OFFSET_0 = gl.constexpr(128.0)  # bfloat16 offsets are zero point - 128 (prepack.py)

_TO_FLOAT16 = gl.constexpr("""{
    .reg .b32 c;
    prmt.b32 c, $2, 0x64, 0x4240; sub.f16x2 c, c, $3; mul.f16x2 $0, c, $4;
    prmt.b32 c, $2, 0x64, 0x4341; sub.f16x2 c, c, $3; mul.f16x2 $1, c, $4;
}""")

# code * scale - zero * scale, both products exact
_TO_BFLOAT16 = gl.constexpr("""{
    .reg .b32 b; .reg .f32 w0, w1;
    prmt.b32 b, $2, 0, 0x4044; mov.b32 w0, b; fma.rn.f32 w0, w0, $4, $3;
    prmt.b32 b, $2, 0, 0x4244; mov.b32 w1, b; fma.rn.f32 w1, w1, $4, $3;
    cvt.rn.bf16x2.f32 $0, w1, w0;
    prmt.b32 b, $2, 0, 0x4144; mov.b32 w0, b; fma.rn.f32 w0, w0, $4, $3;
    prmt.b32 b, $2, 0, 0x4344; mov.b32 w1, b; fma.rn.f32 w1, w1, $4, $3;
    cvt.rn.bf16x2.f32 $1, w1, w0;
}""")


@gluon.jit
def byte_factors(scale, offset, DTYPE: gl.constexpr):
    """Of rows [64]: float16 (zero, scale) as words [64, 1]; bfloat16 (-zero scale, scale)."""
    if DTYPE.is_fp16():
        return pack_x2(offset)[:, None], pack_x2(scale.to(DTYPE))[:, None]
    else:
        exact = scale.to(gl.float32)
        zero = offset.to(gl.float32) + _ZERO_OF_OFFSET_0
        addend = zero * (exact * -BFLOAT16_SHRINK)
        return addend[:, None], (exact * _SCALE_FACTOR)[:, None]


@gluon.jit
def unpack_bytes(packed, factors, DTYPE: gl.constexpr):
    """Packed words [64, 4 C] to weights [64, 16 C] in the order of the inputs."""
    zero, scale = factors
    C: gl.constexpr = packed.shape[1] // 4
    h0, h1 = gl.inline_asm_elementwise(
        _TO_FLOAT16 if DTYPE.is_fp16() else _TO_BFLOAT16,
        "=&r,=&r,r,r,r",
        [packed, zero, scale],
        (gl.int32, gl.int32),
        True,
        1,
    )
    # [64, t, c, e, h] -> [64, c, h, t, e]
    values = gl.join(unpack_x2(h0, DTYPE), unpack_x2(h1, DTYPE)).reshape([64, 4, C, 2, 2])
    return values.permute([0, 2, 4, 1, 3]).reshape([64, 16 * C])
