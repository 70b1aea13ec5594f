"""Convert 4-bit codes to mma operands for sm90_decode_8bit.py, with bit operations only.

A nibble, code + 8, becomes part of a mantissa: 1024 + nibble or 1024 + 16 nibble in float16 for
keys, 128 + nibble in bfloat16 for values. The added offset is the same for all keys of a product,
so it is subtracted from sums: from the initial sum for keys, from the final sum for values.

Legend: W warps, N keys of a warp's step, D head dim, H = D / 2 bytes of a row; t = lane % 4,
g = lane / 4. A lane's bytes are those of an 8-bit row of H channels (sm90_decode_8bit_load.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.registers import unpack_x2

# Offsets that the operands add to codes: 1024 + 8, and (1024 + 128) / 16 for the upper channels,
# whose queries are divided by 16.
LOW_KEY_OFFSET = gl.constexpr(1032.0)
HIGH_KEY_OFFSET = gl.constexpr(72.0)
VALUE_OFFSET = gl.constexpr(136.0)  # 128 + 8


@gluon.jit
def channel_of_input_4bit(i, HALF: gl.constexpr):
    """Return the lower channel at index i of the sum over channels; the upper channel is + H.

    A lane has H / 4 adjacent bytes. Its word w has the indices 16 w to 16 w + 15. The nibbles of
    bytes 0 and 2 make register h = 0, those of bytes 1 and 3 make register h = 1:

        i = 16 w + 8 h + 2 t + e
        d = H / 4 t + 4 w + 2 e + h
    """
    return i // 2 % 4 * (HALF // 4) + i // 16 * 4 + i % 2 * 2 + i // 8 % 2


@gluon.jit
def channel_of_output_4bit(n, HALF: gl.constexpr):
    """Return the channel d in row n of the product of values and weights.

    Row n has half c of byte b, one of the H / 8 adjacent bytes of lane group g.

    n = H c + 8 b + g
    d = H c + H / 8 g + b
    """
    return n // HALF * HALF + n % 8 * (HALF // 8) + n % HALF // 8


@gluon.jit
def half_pair(words):
    """Return the float16 scale and zero of each word, in float32."""
    scale = words.to(gl.int16).to(gl.float16, bitcast=True)
    zero = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return scale.to(gl.float32), zero.to(gl.float32)


@gluon.jit
def key_operands_4bit(words, OPERAND_A: gl.constexpr):
    """Convert words of codes [W, N / 16, 16, H / 4] to two operands A [W, N, H].

    The operand of the lower channels has 1024 + code + 8, that of the upper channels
    1024 + 16 (code + 8).
    """
    low_even, low_odd, high_even, high_odd = gl.inline_asm_elementwise(
        """{
        .reg .b32 odd;
        shr.u32 odd, $4, 8;
        lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $1, odd, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $2, $4, 0x00F000F0, 0x64006400, 0xEA;
        lop3.b32 $3, odd, 0x00F000F0, 0x64006400, 0xEA;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    low = _key_operand(low_even, low_odd, OPERAND_A)
    return low, _key_operand(high_even, high_odd, OPERAND_A)


@gluon.jit
def _key_operand(even, odd, OPERAND_A: gl.constexpr):
    W: gl.constexpr = even.shape[0]
    N: gl.constexpr = even.shape[1] * 16
    HALF: gl.constexpr = even.shape[3] * 4
    # [W, N, t, w, h, e] to [W, N, w, h, t, e]
    k = unpack_x2(gl.join(even, odd), gl.float16).reshape([W, N, 4, HALF // 16, 2, 2])
    k = k.permute([0, 1, 3, 4, 2, 5]).reshape([W, N, HALF])
    return gl.convert_layout(k, OPERAND_A)


@gluon.jit
def value_operand_4bit(even, odd, OPERAND_A: gl.constexpr):
    """Convert bytes [W, N / 16, 8, H] of keys 2 p and 2 p + 1 to operand A [W, D, N].

    The operand has 128 + code + 8, its rows in the order of channel_of_output_4bit.
    """
    W: gl.constexpr = even.shape[0]
    N: gl.constexpr = even.shape[1] * 16
    HALF: gl.constexpr = even.shape[3]
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 x, y, s;
        prmt.b32 x, $8, $9, 0x5410;
        prmt.b32 y, $8, $9, 0x7632;
        lop3.b32 $0, x, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 s, x, 4;
        lop3.b32 $4, s, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 s, x, 8;
        lop3.b32 $1, s, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 s, x, 12;
        lop3.b32 $5, s, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $2, y, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 s, y, 4;
        lop3.b32 $6, s, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 s, y, 8;
        lop3.b32 $3, s, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 s, y, 12;
        lop3.b32 $7, s, 0x000F000F, 0x43004300, 0xEA;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [even, odd],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=4,
    )
    # [W, N / 16, p, g, b, c, parity] to [W, c, b, g, N / 16, p, parity]
    v = unpack_x2(gl.join(low, high), gl.bfloat16)
    v = v.reshape([W, N // 16, 8, 8, HALF // 8, 2, 2])
    v = v.permute([0, 5, 4, 3, 1, 2, 6]).reshape([W, 2 * HALF, N])
    return gl.convert_layout(v, OPERAND_A)
