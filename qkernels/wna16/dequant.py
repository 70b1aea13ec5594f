"""Words of the private order to the tensor core's left operand, in Gluon.

A thread holds word t = lane % 4 of two rows, lane // 4 and 8 below it, as the operand wants them.
Only the load moves anything between threads. A weight is rounded once, to the bits of
PackedWeight.dequantize.

Legend: C words of one row and one t, 128 / BITS inputs each; PIECE inputs of one product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.wna16.dequant_int4 import nibble_factors, unpack_nibbles
from qkernels.wna16.dequant_int8 import BFLOAT16_SHRINK, byte_factors, unpack_bytes


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
def rows_layout(PIECE, BITS):
    """Of what a thread holds for its two rows [64]."""
    return gl.SliceLayout(1, words_layout(PIECE * BITS // 128))


@gluon.constexpr_function
def _stored_layout(BITS):
    """Of the words of 128 inputs [64, 4 BITS], as they lie in shared memory: [8 BITS, 32]."""
    if BITS == 8:
        return words_layout(8)
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
def load_pieces(stored, PIECE: gl.constexpr, BITS: gl.constexpr):
    """A stored tile in shared memory, 64 outputs by 128 inputs, as words of PIECE inputs each."""
    words = stored.load(_stored_layout(BITS)).reshape([64, 4 * BITS])
    pieces = (gl.convert_layout(words, words_layout(BITS), assert_trivial=True),)
    for _ in gl.static_range((128 // PIECE).bit_length() - 1):
        halves = ()
        for j in gl.static_range(len(pieces)):
            halves += _cut(pieces[j])
        pieces = halves
    return pieces


@gluon.jit
def factors(scale, offset, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """What a step's rows [64] multiply and subtract, as `unpack` takes it."""
    if FORMAT.bits == 8:
        return byte_factors(scale, offset, DTYPE)
    else:
        return nibble_factors(scale, offset, DTYPE)


@gluon.jit
def unpack(words, factors, FORMAT: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """Words [64, 4 C] of a piece to the left operand [64, PIECE]."""
    if FORMAT.bits == 8:
        values = unpack_bytes(words, factors, DTYPE)
    else:
        values = unpack_nibbles(words, factors, DTYPE)
    return gl.convert_layout(values, LEFT, assert_trivial=True)


@gluon.jit
def in_full(sums, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """Sums of products with what `unpack` made of the weights, as they should be."""
    if FORMAT.bits == 8 and not DTYPE.is_fp16():
        return sums * (1 / BFLOAT16_SHRINK)
    else:
        return sums
