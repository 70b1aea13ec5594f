"""Packed 4-bit codes in shared memory to operand A of an 8-bit wgmma in registers, in Gluon.

A thread loads the 16 bytes of each of its two rows, lane // 4 and lane // 4 + 8, that belong to its
part of operand A. Only that load crosses threads. Codes become int8 in three instructions for
eight, e4m3 in nine, both exactly (layout.py has their factors).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.registers import signed_nibbles

# A word of eight codes, each a sign and a magnitude, to two words of e4m3. Of a code n, t is the
# sign bit: n + 0x79 t has that at bit 7, and one added to the magnitude of a negative number.
_TO_FLOAT8 = gl.constexpr("""{
    .reg .b32 n, t, high;
    and.b32 n, $2, 0x0F0F0F0F; shr.u32 t, $2, 3; and.b32 t, t, 0x01010101;
    mad.lo.u32 $0, t, 0x79, n;
    shr.u32 high, $2, 4; and.b32 n, high, 0x0F0F0F0F;
    shr.u32 t, $2, 7; and.b32 t, t, 0x01010101;
    mad.lo.u32 $1, t, 0x79, n;
}""")


@gluon.constexpr_function
def _stored_layout():
    """Layout of a stored tile's packed codes [32, 128] as in shared memory: two rows a line."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [4, 0]],
        lane_bases=[[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 128],
    )


@gluon.jit
def load_codes(stored, GROUPS: gl.constexpr):
    """Packed codes of a stored tile's K step, as GROUPS tensors [64, 4 lanes, C, 4 bytes]."""
    codes = (stored.load(_stored_layout()).reshape([64, 4, 4, 4]),)
    for _ in gl.static_range(GROUPS.bit_length() - 1):
        halved = ()
        for j in gl.static_range(len(codes)):
            C: gl.constexpr = codes[j].shape[2] // 2
            pair = codes[j].reshape([64, 4, 2, C, 4]).permute([0, 1, 3, 4, 2])
            halved += gl.split(pair)
        codes = halved
    return codes


@gluon.jit
def expand(codes, DTYPE: gl.constexpr, A: gl.constexpr):
    """Packed codes [64, 4, C, 4] to operand A, [64, 32 C] in the order of the inputs."""
    C: gl.constexpr = codes.shape[2]
    if DTYPE.is_int8():
        low, high = signed_nibbles(codes)
    else:
        low, high = gl.inline_asm_elementwise(
            _TO_FLOAT8, "=r,=r,r", [codes], (gl.int8, gl.int8), is_pure=True, pack=4
        )
        low = low.to(DTYPE, bitcast=True)
        high = high.to(DTYPE, bitcast=True)
    # [64, t, C, j, h] -> [64, C, h, t, j]
    values = gl.join(low, high).permute([0, 2, 4, 1, 3]).reshape([64, 32 * C])
    return gl.convert_layout(values, A, assert_trivial=True)
