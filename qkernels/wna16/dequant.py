"""Prepacked weights in shared memory to operand A of wgmma in registers, in Gluon.

A thread loads word t = lane % 4 of rows lane // 4 and lane // 4 + 8, which is what it holds of
operand A. Only that load crosses threads; unpacking stays within each. Weights are rounded once, to
the bits of PackedWeight.dequantize.

Legend: C packed words of one row and one t, 128 / BITS inputs each; K_SUBTILE inputs of one wgmma.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.wna16.dequant_int4 import nibble_factors, unpack_nibbles
from qkernels.wna16.dequant_int8 import BFLOAT16_SHRINK, byte_factors, unpack_bytes


@gluon.constexpr_function
def packed_layout(C):
    """Of packed words [64, 4 C] in registers."""
    columns = [[0, 1 << i] for i in range(C.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*columns, [8, 0]],
        lane_bases=[[0, C], [0, 2 * C], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4 * C],
    )


@gluon.constexpr_function
def rows_layout(K_SUBTILE, BITS):
    """Of a value for each row [64]: a thread holds those of its two rows."""
    return gl.SliceLayout(1, packed_layout(K_SUBTILE * BITS // 128))


@gluon.constexpr_function
def _stored_layout(BITS):
    """Of the packed words of 128 inputs [64, 4 BITS] as shared memory has them: [8 BITS, 32]."""
    if BITS == 8:
        return packed_layout(8)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [4, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 32],
    )


@gluon.jit
def _split_k(packed):
    """Packed words [64, 4 C] split along K into two [64, 2 C]."""
    C: gl.constexpr = packed.shape[1] // 8
    low, high = gl.split(packed.reshape([64, 4, 2, C]).permute([0, 1, 3, 2]))
    low = gl.convert_layout(low.reshape([64, 4 * C]), packed_layout(C), assert_trivial=True)
    high = gl.convert_layout(high.reshape([64, 4 * C]), packed_layout(C), assert_trivial=True)
    return low, high


@gluon.jit
def load_k_subtiles(stored, K_SUBTILE: gl.constexpr, BITS: gl.constexpr):
    """The packed words of each K subtile of a stored tile, 64 outputs by 128 inputs."""
    packed = stored.load(_stored_layout(BITS)).reshape([64, 4 * BITS])
    subtiles = (gl.convert_layout(packed, packed_layout(BITS), assert_trivial=True),)
    for _ in gl.static_range((128 // K_SUBTILE).bit_length() - 1):
        halved = ()
        for j in gl.static_range(len(subtiles)):
            halved += _split_k(subtiles[j])
        subtiles = halved
    return subtiles


@gluon.jit
def factors(scale, offset, NUMERICS: gl.constexpr, DTYPE: gl.constexpr):
    """What `unpack` multiplies rows [64] by and subtracts from them."""
    if NUMERICS.bits == 8:
        return byte_factors(scale, offset, DTYPE)
    else:
        return nibble_factors(scale, offset, DTYPE)


@gluon.jit
def unpack(packed, factors, NUMERICS: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr):
    """Packed words [64, 4 C] of a K subtile to operand A [64, K_SUBTILE]."""
    if NUMERICS.bits == 8:
        values = unpack_bytes(packed, factors, DTYPE)
    else:
        values = unpack_nibbles(packed, factors, DTYPE)
    return gl.convert_layout(values, A, assert_trivial=True)


@gluon.jit
def rescale(sums, NUMERICS: gl.constexpr, DTYPE: gl.constexpr):
    """Sums of products with the weights of `unpack`, in which a power of two may be left."""
    if NUMERICS.bits == 8 and not DTYPE.is_fp16():
        return sums * (1 / BFLOAT16_SHRINK)
    else:
        return sums
