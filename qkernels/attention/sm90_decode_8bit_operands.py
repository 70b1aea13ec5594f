"""Convert 8-bit codes to 16-bit mma operands for sm90_decode_8bit.py, in the order of their bytes.

Legend: W warps, N keys of a warp's step, D head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.registers import FLOAT8_TO_HALF, INT_TO_HALF, unpack_x2


@gluon.jit
def channel_of_input(i):
    """Return the channel d at index i of the sum over channels in the product of queries and keys.

    mma gives lane t = lane % 4 the indices 2 t + e and 8 + 2 t + e of each 16.
    The lane holds 16 adjacent bytes of each chunk c of 64 channels.
    Its word w has indices 16 w to 16 w + 15 of the chunk; half h of the word has 8 of them.

        i = 64 c + 16 w + 8 h + 2 t + e
        d = 64 c + 16 t + 4 w + 2 h + e

        lane t           0                1                2                3
        channels d       0 1 2 3 4 5 ..   16 17 18 19 ..   32 33 34 35 ..   48 49 50 51 ..
        their indices i  0 1 8 9 16 17 .. 2 3 10 11 ..     4 5 12 13 ..     6 7 14 15 ..
    """
    return i // 64 * 64 + i // 2 % 4 * 16 + i // 16 % 4 * 4 + i // 8 % 2 * 2 + i % 2


@gluon.jit
def channel_of_output(n, CHUNK: gl.constexpr):
    """Return the channel d in row n of the product of values and weights. C is CHUNK.

    mma gives lane group g = lane / 4 row g of each 8. The group holds C adjacent bytes of each
    chunk r of 8 C channels. Its byte b is in the b-th 8 rows:

        n = 8 C r + 8 b + g
        d = 8 C r + C g + b

        group g      0             1                    2
        channels d   0 1 2 ..      C C+1 C+2 ..         2C 2C+1 2C+2 ..
        their rows   0 8 16 ..     1 9 17 ..            2 10 18 ..
    """
    return n // (8 * CHUNK) * (8 * CHUNK) + n % 8 * CHUNK + n % (8 * CHUNK) // 8


@gluon.jit
def _half_keys(words, IS_INT: gl.constexpr):
    """Convert words of four 8-bit codes to float16 [..., 2, 2], exactly."""
    to_half: gl.constexpr = INT_TO_HALF if IS_INT else FLOAT8_TO_HALF
    low, high = gl.inline_asm_elementwise(
        to_half, "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return unpack_x2(gl.join(low, high), gl.float16)


@gluon.jit
def _pairs_of_values(even, odd, IS_INT: gl.constexpr):
    """Convert the 8-bit codes of two keys to words with a pair of bfloat16 each, exactly."""
    if IS_INT:
        # (128 + the low seven bits) minus (128 + the weight of the sign bit)
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, low, sign, minus;
            mov.b32 minus, 0xBF80BF80;
            prmt.b32 a, $4, $5, 0x4400;
            prmt.b32 b, $4, $5, 0x5511;
            prmt.b32 c, $4, $5, 0x6622;
            prmt.b32 d, $4, $5, 0x7733;
            lop3.b32 low, a, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 sign, a, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, sign, minus, low;
            lop3.b32 low, b, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 sign, b, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, sign, minus, low;
            lop3.b32 low, c, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 sign, c, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $2, sign, minus, low;
            lop3.b32 low, d, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 sign, d, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $3, sign, minus, low;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [even, odd],
            dtype=gl.int32,
            is_pure=True,
            pack=4,
        )
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 ab, cd, x, y;
        .reg .b16 a, b, c, d, low, high;
        .reg .f32 f, g;
        prmt.b32 ab, $4, $5, 0x5140;
        prmt.b32 cd, $4, $5, 0x7362;
        mov.b32 {a, b}, ab;
        mov.b32 {c, d}, cd;
        cvt.rn.f16x2.e4m3x2 x, a;
        mov.b32 {low, high}, x;
        cvt.f32.f16 f, low;
        cvt.f32.f16 g, high;
        cvt.rn.bf16x2.f32 $0, g, f;
        cvt.rn.f16x2.e4m3x2 y, b;
        mov.b32 {low, high}, y;
        cvt.f32.f16 f, low;
        cvt.f32.f16 g, high;
        cvt.rn.bf16x2.f32 $1, g, f;
        cvt.rn.f16x2.e4m3x2 x, c;
        mov.b32 {low, high}, x;
        cvt.f32.f16 f, low;
        cvt.f32.f16 g, high;
        cvt.rn.bf16x2.f32 $2, g, f;
        cvt.rn.f16x2.e4m3x2 y, d;
        mov.b32 {low, high}, y;
        cvt.f32.f16 f, low;
        cvt.f32.f16 g, high;
        cvt.rn.bf16x2.f32 $3, g, f;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [even, odd],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def key_operand(codes, IS_INT: gl.constexpr, OPERAND_A: gl.constexpr):
    """Convert words of codes [W, N / 16, 16, D / 4] to operand A [W, N, D].

    Its inputs are in the order of channel_of_input.
    """
    W: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1] * 16
    D: gl.constexpr = codes.shape[3] * 4
    # [W, N, c, t, w, h, e] to [W, N, c, w, h, t, e]
    k = _half_keys(codes, IS_INT).reshape([W, N, D // 64, 4, 4, 2, 2])
    k = k.permute([0, 1, 2, 4, 5, 3, 6]).reshape([W, N, D])
    return gl.convert_layout(k, OPERAND_A)


@gluon.jit
def value_operand(even, odd, IS_INT: gl.constexpr, CHUNK: gl.constexpr, OPERAND_A: gl.constexpr):
    """Convert codes [W, N / 16, 8, D] of keys 2 p and 2 p + 1 to operand A [W, D, N].

    Its rows are in the order of channel_of_output.
    """
    W: gl.constexpr = even.shape[0]
    N: gl.constexpr = even.shape[1] * 16
    D: gl.constexpr = even.shape[3]
    # [W, N / 16, p, r, g, b, parity] to [W, r, b, g, N / 16, p, parity]
    v = unpack_x2(_pairs_of_values(even, odd, IS_INT), gl.bfloat16)
    v = v.reshape([W, N // 16, 8, D // (8 * CHUNK), 8, CHUNK, 2])
    v = v.permute([0, 3, 5, 4, 1, 2, 6]).reshape([W, D, N])
    return gl.convert_layout(v, OPERAND_A)
