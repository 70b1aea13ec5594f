"""Convert prepacked weights in shared memory to operand A of wgmma in registers, in Gluon.

A thread loads word t = lane % 4 of rows lane // 4 and lane // 4 + 8, its own elements of operand A.
Only this load crosses threads; a thread unpacks its own words. Weights are rounded once, to the
same bits as PackedWeight.dequantize.

4 bits: a packed word has two codes at the same bits of its two halves. A mask alone turns codes
into numbers. In bfloat16 a code q in bits 0 to 7 is q times 2^-133, and a fused multiply-add with a
power of two subtracts the zero point. In float16 it is or-ed into 1024. So the codes at bits 0 and
4 need no shift, and those at bits 8 and 12 share one.

8 bits: in float16 the byte permute that takes two codes out of a word makes both 1024 + code. In
bfloat16 the 11 bits of a scale times the 8 bits of a code need float32 and one rounding at the end.
A code at bits 16 to 23 of a float32 is code 2^-133, normal or subnormal. So the scale is multiplied
by a power of two, and the weights keep another one, BFLOAT16_SHRINK, that `rescale` takes out.

Legend: C packed words of one row and one t, 128 / BITS inputs each; K_SUBTILE inputs of one wgmma.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.gpu.registers import pack_x2, unpack_x2
from qkernels.wna16.layout import groups_ptx

# BFLOAT16_SHRINK and _SCALE_FACTOR for weights in groups: the largest d times the largest 6-bit
# scale is below 2^22.
_GROUPS_SHRINK = gl.constexpr(2.0**-28)
_GROUPS_FACTOR = gl.constexpr(2.0 ** (133 - 28))

BFLOAT16_CODE_FACTOR = gl.constexpr(1 / 64)  # factor in bfloat16 results of codes_minus_zeros

# Factor in bfloat16 weights: it keeps float16's largest scale times 2^109 within float32.
BFLOAT16_SHRINK = gl.constexpr(2.0**-24)
_SCALE_FACTOR = gl.constexpr(2.0 ** (133 - 24))
_ZERO_OF_OFFSET_0 = gl.constexpr(128.0)  # bfloat16 offsets are zero point - 128 (prepack.py)

_TO_FLOAT16 = gl.constexpr("""{
    .reg .b32 c;
    prmt.b32 c, $2, 0x64, 0x4240; sub.f16x2 c, c, $3; mul.f16x2 $0, c, $4;
    prmt.b32 c, $2, 0x64, 0x4341; sub.f16x2 c, c, $3; mul.f16x2 $1, c, $4;
}""")

# code * scale - zero * scale; both products are exact
_TO_BFLOAT16 = gl.constexpr("""{
    .reg .b32 b; .reg .f32 w0, w1;
    prmt.b32 b, $2, 0, 0x4044; mov.b32 w0, b; fma.rn.f32 w0, w0, $4, $3;
    prmt.b32 b, $2, 0, 0x4244; mov.b32 w1, b; fma.rn.f32 w1, w1, $4, $3;
    cvt.rn.bf16x2.f32 $0, w1, w0;
    prmt.b32 b, $2, 0, 0x4144; mov.b32 w0, b; fma.rn.f32 w0, w0, $4, $3;
    prmt.b32 b, $2, 0, 0x4344; mov.b32 w1, b; fma.rn.f32 w1, w1, $4, $3;
    cvt.rn.bf16x2.f32 $1, w1, w0;
}""")


@gluon.constexpr_function
def packed_layout(C):
    """Layout of packed words [64, 4 C] in registers."""
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
    """Layout of a value for each row [64]: a thread holds those of its two rows."""
    return gl.SliceLayout(1, packed_layout(K_SUBTILE * BITS // 128))


@gluon.constexpr_function
def _stored_layout(C):
    """Layout of packed words [64, 4 C] as in shared memory: [8 C, 32]."""
    words = [[0, 1 << bit] if bit < 5 else [1 << (bit - 5), 0] for bit in range(11)]
    column = C.bit_length() - 1
    t, row = column, column + 2
    return gl.DistributedLinearLayout(
        reg_bases=[*words[:column], words[row + 3]],
        lane_bases=[*words[t : t + 2], *words[row : row + 3]],
        warp_bases=words[row + 4 : row + 6],
        block_bases=[],
        shape=[8 * C, 32],
    )


@gluon.jit
def _split_k(packed):
    """Split packed words [64, 4 C] along K into two [64, 2 C]."""
    C: gl.constexpr = packed.shape[1] // 8
    low, high = gl.split(packed.reshape([64, 4, 2, C]).permute([0, 1, 3, 2]))
    low = gl.convert_layout(low.reshape([64, 4 * C]), packed_layout(C), assert_trivial=True)
    high = gl.convert_layout(high.reshape([64, 4 * C]), packed_layout(C), assert_trivial=True)
    return low, high


@gluon.jit
def load_words(stored, C: gl.constexpr):
    """Load the packed words [64, 4 C] of 64 outputs, stored in [8 C, 32]."""
    packed = stored.load(_stored_layout(C)).reshape([64, 4 * C])
    return gl.convert_layout(packed, packed_layout(C), assert_trivial=True)


@gluon.jit
def load_k_subtiles(stored, K_SUBTILE: gl.constexpr, BITS: gl.constexpr):
    """Load the packed words of each K subtile of a stored tile, 64 outputs by 128 inputs."""
    subtiles = (load_words(stored, BITS),)
    for _ in gl.static_range((128 // K_SUBTILE).bit_length() - 1):
        halved = ()
        for j in gl.static_range(len(subtiles)):
            halved += _split_k(subtiles[j])
        subtiles = halved
    return subtiles


@gluon.constexpr_function
def _ptx(is_float16, bit, scaled, rounded=False):
    """To $0: the codes at `bit` (0 or 4) of both halves of $1, minus $2, exactly.

    scaled: times $3 + $4, rounded once, since the product with $4 is exact. rounded: times $3.
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
    if rounded:
        scale = "mul.f16x2 $0, c, $3;" if is_float16 else "mul.bf16x2 $0, c, $3;"
    to, scale = ("c", scale) if scaled else ("$0", "")
    return f"{{ .reg .b32 c, f, x; {codes} mov.b32 f, {factor}; {fma} {to}, c, f, $2; {scale} }}"


@gluon.jit
def zeros_to_subtract(offset, DTYPE: gl.constexpr):
    """Convert rows' offsets [64] to the numbers to subtract from codes at (bit 0, bit 4).

    Both are words [64, 1].
    """
    zero = offset.to(gl.float32)
    if DTYPE.is_fp16():
        return pack_x2((-zero).to(DTYPE))[:, None], pack_x2((960 - zero).to(DTYPE))[:, None]
    else:
        both = pack_x2(((128 - zero) * BFLOAT16_CODE_FACTOR).to(DTYPE))[:, None]
        return both, both


@gluon.jit
def scale_of_codes(scale, DTYPE: gl.constexpr):
    """Return the factor by which the values of codes_minus_zeros must be multiplied."""
    if DTYPE.is_fp16():
        return scale
    else:
        return scale * (1 / BFLOAT16_CODE_FACTOR)


@gluon.jit
def codes_minus_zeros(packed, zeros, DTYPE: gl.constexpr):
    """Convert packed words [64, 4 C] to codes minus zero points [64, 32 C], in the inputs' order.

    zeros: result of zeros_to_subtract. bfloat16 values are multiplied by BFLOAT16_CODE_FACTOR.
    """
    AT_0: gl.constexpr = _ptx(DTYPE.is_fp16(), 0, False)
    AT_4: gl.constexpr = _ptx(DTYPE.is_fp16(), 4, False)
    zero_0, zero_4 = zeros
    p0 = _codes(packed, zero_0, AT_0)
    p1 = _codes(packed, zero_4, AT_4)
    p2 = _codes(packed >> 8, zero_0, AT_0)
    p3 = _codes(packed >> 8, zero_4, AT_4)
    return in_order(p0, p1, p2, p3, DTYPE)


@gluon.jit
def _codes(packed, zero, PTX: gl.constexpr):
    return gl.inline_asm_elementwise(PTX, "=r,r,r", [packed, zero], gl.int32, True, 1)


@gluon.jit
def in_order(p0, p1, p2, p3, DTYPE: gl.constexpr):
    """Reorder pairs [64, 4 C] of codes at bits 0, 4, 8, 12 to [64, 32 C], in the inputs' order."""
    C: gl.constexpr = p0.shape[1] // 4
    i0 = gl.join(unpack_x2(p0, DTYPE), unpack_x2(p1, DTYPE))
    i1 = gl.join(unpack_x2(p2, DTYPE), unpack_x2(p3, DTYPE))
    # [64, t, c, e, h, i] -> [64, c, i, h, t, e]
    values = gl.join(i0, i1).reshape([64, 4, C, 2, 2, 2]).permute([0, 2, 5, 4, 1, 3])
    return values.reshape([64, 32 * C])


@gluon.jit
def nibble_factors(scale, offset, DTYPE: gl.constexpr):
    """Return (zero of codes at bit 0, zero of codes at bit 4, high, low) as words [64, 1].

    A row's scale is high + low: a float16 scale is a bfloat16 number plus a remainder of 3 bits.
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
    """Convert packed words [64, 4 C] to weights [64, 32 C], in the order of the inputs."""
    AT_0: gl.constexpr = _ptx(DTYPE.is_fp16(), 0, True)
    AT_4: gl.constexpr = _ptx(DTYPE.is_fp16(), 4, True)
    zero_0, zero_4, high, low = factors
    p0 = _weights(packed, zero_0, high, low, AT_0)
    p1 = _weights(packed, zero_4, high, low, AT_4)
    p2 = _weights(packed >> 8, zero_0, high, low, AT_0)
    p3 = _weights(packed >> 8, zero_4, high, low, AT_4)
    return in_order(p0, p1, p2, p3, DTYPE)


@gluon.constexpr_function
def _fma_ptx(bit):
    """To $0: the bfloat16 codes at `bit` (0 or 4) of both halves of $1, times $2 plus $3."""
    mask = {0: "0x000F000F", 4: "0x00F000F0"}[bit]
    return f"{{ .reg .b32 c; and.b32 c, $1, {mask}; fma.rn.bf16x2 $0, c, $2, $3; }}"


@gluon.jit
def rounded_factors(scale, offset, NUMERICS: gl.constexpr, DTYPE: gl.constexpr):
    """Return the rows' factors [64, 1] for `unpack_rounded`. The scales must fit in DTYPE."""
    exact = scale.to(gl.float32)
    if DTYPE.is_fp16() or NUMERICS.has_offsets:
        zero_0, zero_4 = zeros_to_subtract(offset, DTYPE)
        return zero_0, zero_4, pack_x2(scale_of_codes(exact, DTYPE).to(DTYPE))[:, None]
    else:
        factor = exact * _SCALE_FACTOR
        at_0 = pack_x2(factor.to(DTYPE))[:, None]
        at_4 = pack_x2((factor * (1 / 16)).to(DTYPE))[:, None]
        zero = offset.to(gl.float32) - _ZERO_OF_OFFSET_0
        return at_0, at_4, pack_x2((zero * (exact * -BFLOAT16_SHRINK)).to(DTYPE))[:, None]


@gluon.jit
def unpack_rounded(
    packed, row_factors, NUMERICS: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr
):
    """Convert packed 4-bit words [64, 4 C] of a K subtile to operand A.

    The weights are those of `unpack` times a power of two, which `rescale_rounded` removes from
    the sums.
    """
    first, second, third = row_factors
    if DTYPE.is_fp16() or NUMERICS.has_offsets:
        AT_0: gl.constexpr = _ptx(DTYPE.is_fp16(), 0, True, True)
        AT_4: gl.constexpr = _ptx(DTYPE.is_fp16(), 4, True, True)
    else:
        # code * (scale 2^133) - zero * scale, exact for the zero point 8. BFLOAT16_SHRINK keeps the
        # factor finite.
        AT_0: gl.constexpr = _fma_ptx(0)
        AT_4: gl.constexpr = _fma_ptx(4)
    p0 = _two_factors(packed, first, third, AT_0)
    p1 = _two_factors(packed, second, third, AT_4)
    p2 = _two_factors(packed >> 8, first, third, AT_0)
    p3 = _two_factors(packed >> 8, second, third, AT_4)
    return gl.convert_layout(in_order(p0, p1, p2, p3, DTYPE), A, assert_trivial=True)


@gluon.jit
def _two_factors(packed, first, second, PTX: gl.constexpr):
    return gl.inline_asm_elementwise(PTX, "=r,r,r,r", [packed, first, second], gl.int32, True, 1)


@gluon.jit
def rescale_rounded(sums, NUMERICS: gl.constexpr, DTYPE: gl.constexpr):
    """Remove the power of two from sums of products with the weights of `unpack_rounded`."""
    if DTYPE.is_fp16() or NUMERICS.has_offsets:
        return sums
    elif NUMERICS.groups > 1:
        return sums * (1 / _GROUPS_SHRINK)
    else:
        return sums * (1 / BFLOAT16_SHRINK)


@gluon.constexpr_function
def _row_words_layout(W):
    """Layout of W words of each row, [64 W], in which a thread holds those of its two rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[*([1 << i] for i in range(W.bit_length() - 1)), [8 * W]],
        lane_bases=[[0], [0], [W], [2 * W], [4 * W]],
        warp_bases=[[16 * W], [32 * W]],
        block_bases=[],
        shape=[64 * W],
    )


@gluon.constexpr_function
def groups_layout(C):
    """Layout of packed words [64, 4 C] as [64, t, C]."""
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, 0, 1 << i] for i in range(C.bit_length() - 1)), [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, C],
    )


@gluon.jit
def load_row_words(stored, W: gl.constexpr):
    """Load the W words of each row from shared memory [64 W], as a tuple of W tensors [64]."""
    words = stored.load(_row_words_layout(W))
    if W == 1:
        return (words,)
    elif W == 2:
        return gl.split(words.reshape([64, 2]))
    else:
        even, odd = gl.split(words.reshape([64, 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        return first, second, third, fourth


@gluon.jit
def _half(words):
    """Return the float16 numbers in the low halves of words, in float32."""
    return (words & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def group_factors(
    scales,
    block,
    i: gl.constexpr,
    K_SUBTILE: gl.constexpr,
    NUMERICS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Return the groups' scales and minima of a K subtile, float32 [64, C], for `unpack_groups`.

    scales: a row's words; the scales of four groups, then their minima, as bytes or float16.
    block: words with d and dmin. The products of bytes with d and dmin are exact.
    """
    C: gl.constexpr = K_SUBTILE // 32
    GROUPS: gl.constexpr = gl.SliceLayout(1, groups_layout(C))
    ROWS: gl.constexpr = gl.SliceLayout(1, GROUPS)
    group = i * C + gl.arange(0, C, gl.SliceLayout(0, GROUPS))
    if NUMERICS.steps_per_block > 0:
        both = gl.convert_layout(block, ROWS, assert_trivial=True)
        d, dmin = _half(both), _half(both >> 16)
        shifts = (8 * group)[None, :]
        scale = gl.convert_layout(scales[0], ROWS, assert_trivial=True)[:, None] >> shifts
        minimum = gl.convert_layout(scales[1], ROWS, assert_trivial=True)[:, None] >> shifts
        scale = (scale & 0xFF).to(gl.float32)
        minimum = (minimum & 0xFF).to(gl.float32)
    else:
        WORD: gl.constexpr = i * C // 2
        shifts = (16 * (group % 2))[None, :]
        scale = gl.convert_layout(scales[WORD], ROWS, assert_trivial=True)[:, None] >> shifts
        minimum = gl.convert_layout(scales[2 + WORD], ROWS, assert_trivial=True)[:, None] >> shifts
        scale, minimum = _half(scale), _half(minimum)
        d = gl.full([64], 1.0, gl.float32, ROWS)
        dmin = d
    if DTYPE.is_bf16():
        d *= _GROUPS_FACTOR
        dmin *= _GROUPS_SHRINK
    return scale * d[:, None], minimum * -dmin[:, None]


_groups_ptx = gluon.constexpr_function(groups_ptx)


@gluon.jit
def unpack_groups(packed, scale, minimum, DTYPE: gl.constexpr, A: gl.constexpr):
    """Convert packed 4-bit words [64, 4 C] of a K subtile to operand A: code * scale + minimum.

    `scale` and `minimum` [64, C] are from group_factors; the codes of a word are in one group. The
    weights are rounded once. `rescale_rounded` removes their power of two from the sums.
    """
    PTX: gl.constexpr = _groups_ptx(4, DTYPE.is_fp16())
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,=&r,=&r,r,r,r",
        [packed, for_words(scale), for_words(minimum)],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        True,
        1,
    )
    return gl.convert_layout(in_order(p0, p1, p2, p3, DTYPE), A, assert_trivial=True)


@gluon.jit
def for_words(values):
    """Broadcast the groups' values [64, C] to packed words [64, 4 C]."""
    C: gl.constexpr = values.shape[1]
    WORDS: gl.constexpr = groups_layout(C)
    spread, _ = gl.broadcast(values[:, None, :], gl.zeros([64, 4, C], gl.float32, WORDS))
    return gl.convert_layout(spread.reshape([64, 4 * C]), packed_layout(C), assert_trivial=True)


@gluon.jit
def byte_factors(scale, offset, DTYPE: gl.constexpr):
    """Return the rows' factors [64, 1].

    float16: (zero, scale); bfloat16: (-zero scale, scale).
    """
    if DTYPE.is_fp16():
        return pack_x2(offset)[:, None], pack_x2(scale.to(DTYPE))[:, None]
    else:
        exact = scale.to(gl.float32)
        zero = offset.to(gl.float32) + _ZERO_OF_OFFSET_0
        addend = zero * (exact * -BFLOAT16_SHRINK)
        return addend[:, None], (exact * _SCALE_FACTOR)[:, None]


@gluon.jit
def unpack_bytes(packed, factors, DTYPE: gl.constexpr):
    """Convert packed words [64, 4 C] to weights [64, 16 C], in the order of the inputs."""
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


@gluon.jit
def factors(scale, offset, NUMERICS: gl.constexpr, DTYPE: gl.constexpr):
    """Return the rows' factors [64, 1] for `unpack`."""
    if NUMERICS.bits == 8:
        return byte_factors(scale, offset, DTYPE)
    else:
        return nibble_factors(scale, offset, DTYPE)


@gluon.jit
def unpack(packed, factors, NUMERICS: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr):
    """Convert packed words [64, 4 C] of a K subtile to operand A [64, K_SUBTILE]."""
    if NUMERICS.bits == 8:
        values = unpack_bytes(packed, factors, DTYPE)
    else:
        values = unpack_nibbles(packed, factors, DTYPE)
    return gl.convert_layout(values, A, assert_trivial=True)


@gluon.jit
def rescale(sums, NUMERICS: gl.constexpr, DTYPE: gl.constexpr):
    """Remove the power of two, if any, from sums of products with the weights of `unpack`."""
    if NUMERICS.bits == 8 and not DTYPE.is_fp16():
        return sums * (1 / BFLOAT16_SHRINK)
    else:
        return sums
