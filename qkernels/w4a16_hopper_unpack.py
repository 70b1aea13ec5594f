"""Words of the private order to the tensor core's left operand, in Gluon: moves nothing.

A thread holds word t = lane % 4 of two rows, lane // 4 and 8 below it, as the operand wants them.
A weight is rounded once, to the bits of PackedWeight.dequantize.

Legend: C words of one row and one t, 32 inputs each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gluon_registers import halves


@gluon.constexpr_function
def words_layout(C):
    """Of words [64, 4 C] in registers."""
    columns = [[0, 1 << i] for i in range(C.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*columns, [8, 0]],
        lane_bases=[[0, C], [0, 2 * C], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4 * C],
    )


@gluon.constexpr_function
def stored_layout():
    """Of the same [64, 16], as a stored tile lies in shared memory: [32, 32]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [4, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 32],
    )


@gluon.jit
def _cut(words):
    """Words [64, 4 C] cut along the inputs into two [64, 2 C]."""
    C: gl.constexpr = words.shape[1] // 8
    w0, w1 = gl.split(words.reshape([64, 4, 2, C]).permute([0, 1, 3, 2]))
    w0 = gl.convert_layout(w0.reshape([64, 4 * C]), words_layout(C), assert_trivial=True)
    w1 = gl.convert_layout(w1.reshape([64, 4 * C]), words_layout(C), assert_trivial=True)
    return w0, w1


@gluon.jit
def load_pieces(stored, PIECE: gl.constexpr):
    """A stored tile in shared memory, 64 outputs by 128 inputs, as words of PIECE inputs each."""
    words = stored.load(stored_layout()).reshape([64, 16])
    w0, w1 = _cut(gl.convert_layout(words, words_layout(4), assert_trivial=True))
    if PIECE == 64:
        return w0, w1
    else:
        return _cut(w0) + _cut(w1)


@gluon.jit
def _twice(values):
    """16-bit numbers [64] into both halves of words [64, 1]."""
    bits = values.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return (bits | (bits << 16))[:, None]


@gluon.jit
def factors(
    scale,
    offset,
    PIECE: gl.constexpr,
    OFFSET: gl.constexpr,
    HAS_OFFSETS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """What unpack subtracts, and the scale as high + low, each in both halves of a word.

    A float16 scale is a bfloat16 number and a rest of three bits.
    """
    exact = scale.to(gl.float32)
    if DTYPE.is_fp16():
        high = _twice(exact.to(DTYPE))
        low = high
    else:
        high, low = gl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .f32 h; cvt.rn.bf16x2.f32 $0, $2, $2; shl.b32 t, $0, 16;"
            " mov.b32 h, t; sub.f32 h, $2, h; cvt.rn.bf16x2.f32 $1, h, h; }",
            "=&r,=r,r",
            [exact],
            (gl.int32, gl.int32),
            True,
            1,
        )
        high = high[:, None]
        low = low[:, None]
    if HAS_OFFSETS:
        words = _twice(offset).broadcast_to([64, PIECE // 8])
    else:
        words = gl.full([64, PIECE // 8], OFFSET, gl.int32, words_layout(PIECE // 32))
    return words, high, low


@gluon.jit
def _weights(words, magic, offset, high, low, DTYPE: gl.constexpr):
    """The codes at bits 0 and 16 of each word, as (code - offset) (high + low) rounded once.

    code - offset is exact, and in bfloat16 so is its product with `low`.
    """
    if DTYPE.is_fp16():
        return gl.inline_asm_elementwise(
            "{ .reg .b32 c; lop3.b32 c, $1, 0x000F000F, $2, 0xEA; sub.f16x2 c, c, $3;"
            " mul.f16x2 $0, c, $4; }",
            "=r,r,r,r,r",
            [words, magic, offset, high],
            gl.int32,
            True,
            1,
        )
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 c, l; lop3.b32 c, $1, 0x000F000F, $2, 0xEA; sub.bf16x2 c, c, $3;"
            " mul.bf16x2 l, c, $5; fma.rn.bf16x2 $0, c, $4, l; }",
            "=r,r,r,r,r,r",
            [words, magic, offset, high, low],
            gl.int32,
            True,
            1,
        )


@gluon.jit
def unpack(words, offset, high, low, MAGIC: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """Words [64, 4 C] of a piece to the left operand [64, 32 C]."""
    C: gl.constexpr = words.shape[1] // 4
    magic = gl.full(words.shape, MAGIC, gl.int32, words.type.layout)
    p0 = _weights(words, magic, offset, high, low, DTYPE)
    p1 = _weights(words >> 4, magic, offset, high, low, DTYPE)
    p2 = _weights(words >> 8, magic, offset, high, low, DTYPE)
    p3 = _weights(words >> 12, magic, offset, high, low, DTYPE)
    i0 = gl.join(halves(p0, DTYPE), halves(p1, DTYPE))
    i1 = gl.join(halves(p2, DTYPE), halves(p3, DTYPE))
    # [64, t, c, e, h, i] -> [64, c, i, h, t, e]
    values = gl.join(i0, i1).reshape([64, 4, C, 2, 2, 2]).permute([0, 2, 5, 4, 1, 3])
    return gl.convert_layout(values.reshape([64, 32 * C]), LEFT, assert_trivial=True)
