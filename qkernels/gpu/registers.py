"""Gluon functions that split or convert tensors in registers, within each thread."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# PTX: convert a word of four 8-bit codes to two float16x2 words, exactly. An int8 with its sign bit
# flipped is the low byte of the float16 1024 + 128 + code.
INT_TO_HALF = gl.constexpr("""{
    .reg .b32 x, low, high, magic;
    xor.b32 x, $2, 0x80808080;
    mov.b32 magic, 0x64806480;
    prmt.b32 low, x, 0x64646464, 0x4140;
    prmt.b32 high, x, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, low, magic;
    sub.rn.f16x2 $1, high, magic;
}""")

FLOAT8_TO_HALF = gl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@gluon.jit
def signed_nibbles(codes):
    """Convert bytes of two 4-bit codes q to int8 16 (q - 8). Return (low codes, high codes).

    The low codes are shifted left by 4. One lop3 then masks the codes and flips the sign bit.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 shifted; shl.b32 shifted, $2, 4;"
        " lop3.b32 $0, shifted, 0xF0F0F0F0, 0x80808080, 0x6A;"  # (a & b) ^ c
        " lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A; }",
        "=r,=r,r",
        [codes],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def unpack_x2(words, DTYPE: gl.constexpr):
    """Return both 16-bit values of each word: [..., 2]."""
    low = words.to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(low, (words >> 16).to(gl.int16).to(DTYPE, bitcast=True))


@gluon.jit
def pack_x2(values):
    """Return words that hold each 16-bit value twice."""
    bits = values.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def split_columns(x, COUNT: gl.constexpr):
    """Split x [rows, columns] into COUNT tensors of adjacent columns. COUNT is a power of two."""
    xs = (x,)
    for _ in gl.static_range(COUNT.bit_length() - 1):
        pairs = ()
        for j in gl.static_range(len(xs)):
            pair = xs[j].reshape(xs[j].shape[0], 2, xs[j].shape[1] // 2).permute(0, 2, 1)
            pairs += pair.split()
        xs = pairs
    return xs
