"""8-bit codes in words to scaled weights, in Gluon. Moves nothing.

In float16 the byte permute that takes two codes out of a word makes 1024 + code of both. In
bfloat16 a scale's eleven bits times a code's eight need float32, and one rounding at the end. There
a code at bits 16 to 23 is a number already: code 2^-133, be it a normal one or not. So the scale
is multiplied by a power of two, and weights come out smaller than they are, by another.

Legend: C words of one row and one t, 16 inputs each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.registers import pack_x2, unpack_x2

# Of weights in bfloat16: float16's largest scale times 2^109 is still a float32.
BFLOAT16_SHRINK = gl.constexpr(2.0**-24)
_SCALE_FACTOR = gl.constexpr(2.0 ** (133 - 24))
_ZERO_OF_OFFSET_0 = gl.constexpr(128.0)  # a bfloat16 weight's offsets are zero - 128 (gemm.py)

_TO_FLOAT16 = gl.constexpr("""{
    .reg .b32 c;
    prmt.b32 c, $2, 0x64, 0x4240; sub.f16x2 c, c, $3; mul.f16x2 $0, c, $4;
    prmt.b32 c, $2, 0x64, 0x4341; sub.f16x2 c, c, $3; mul.f16x2 $1, c, $4;
}""")

# code scale - zero scale, both exact
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
    """(what is added or subtracted, scale) of rows [64], as words or in float32 [64, 1]."""
    if DTYPE.is_fp16():
        return pack_x2(offset)[:, None], pack_x2(scale.to(DTYPE))[:, None]
    else:
        exact = scale.to(gl.float32)
        zero = offset.to(gl.float32) + _ZERO_OF_OFFSET_0
        less = zero * (exact * -BFLOAT16_SHRINK)
        return less[:, None], (exact * _SCALE_FACTOR)[:, None]


@gluon.jit
def unpack_bytes(words, factors, DTYPE: gl.constexpr):
    """Words [64, 4 C] to weights [64, 16 C] in the order of the inputs."""
    less, scale = factors
    C: gl.constexpr = words.shape[1] // 4
    h0, h1 = gl.inline_asm_elementwise(
        _TO_FLOAT16 if DTYPE.is_fp16() else _TO_BFLOAT16,
        "=&r,=&r,r,r,r",
        [words, less, scale],
        (gl.int32, gl.int32),
        True,
        1,
    )
    # [64, t, c, e, h] -> [64, c, h, t, e]
    values = gl.join(unpack_x2(h0, DTYPE), unpack_x2(h1, DTYPE)).reshape([64, 4, C, 2, 2])
    return values.permute([0, 2, 4, 1, 3]).reshape([64, 16 * C])
