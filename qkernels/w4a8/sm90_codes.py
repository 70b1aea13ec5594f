"""Gluon functions that convert packed 4-bit codes in shared memory to operand A of an 8-bit wgmma.

A thread loads four words of each of its two rows, lane // 4 and lane // 4 + 8: its own elements of
operand A. Only this load crosses threads. The codes of a word are converted to int8 in three
instructions, times multiples in seven, or to e4m3 in nine, all exactly (layout.py has the factors).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qkernels.w4a8.layout import BIAS, BIAS_STEP, FLOAT8_PTX, INT8_PTX, MULTIPLES_PTX

# Both take a word four times, once per byte of a result.
_TO_INT8, _TO_FLOAT8 = gl.constexpr(INT8_PTX), gl.constexpr(FLOAT8_PTX)
_TO_MULTIPLES = gl.constexpr(MULTIPLES_PTX)
_BIAS, _BIAS_STEP = gl.constexpr(BIAS), gl.constexpr(BIAS_STEP)


@gluon.constexpr_function
def _stored_layout():
    """Layout of a stored tile's words [32, 32] as in shared memory: two rows a line."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [4, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 32],
    )


@gluon.constexpr_function
def _bytes_layout(C):
    """Layout of bytes [64, 4 lanes, C words, 4]."""
    words = [[0, 0, 1 << i, 0] for i in range(C.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *words, [8, 0, 0, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 4, C, 4],
    )


@gluon.constexpr_function
def _words_layout(C):
    return gl.SliceLayout(3, _bytes_layout(C))


@gluon.jit
def load_words(stored):
    """Load the packed words of a stored tile's K step: [64, 4 lanes, 4]."""
    words = stored.load(_stored_layout()).reshape([64, 4, 4])
    return gl.convert_layout(words, _words_layout(4), assert_trivial=True)


@gluon.jit
def _halves(words):
    """Split words [64, 4, C] along the inputs into two [64, 4, C / 2]."""
    C: gl.constexpr = words.shape[2] // 2
    low, high = gl.split(words.reshape([64, 4, 2, C]).permute([0, 1, 3, 2]))
    low = gl.convert_layout(low, _words_layout(C), assert_trivial=True)
    return low, gl.convert_layout(high, _words_layout(C), assert_trivial=True)


@gluon.jit
def split_k(words, PARTS: gl.constexpr):
    """Split words [64, 4, C] into PARTS tensors [64, 4, C / PARTS] of adjacent inputs."""
    parts = (words,)
    for _ in gl.static_range(PARTS.bit_length() - 1):
        halved = ()
        for j in gl.static_range(len(parts)):
            halved += _halves(parts[j])
        parts = halved
    return parts


@gluon.jit
def expand(words, DTYPE: gl.constexpr, A: gl.constexpr):
    """Convert packed words [64, 4, C] to operand A [64, 32 C], in the order of the inputs."""
    C: gl.constexpr = words.shape[2]
    PTX: gl.constexpr = _TO_INT8 if DTYPE.is_int8() else _TO_FLOAT8
    copies = gl.full([64, 4, C, 4], 0, gl.int32, _bytes_layout(C)) | gl.expand_dims(words, 3)
    low, high = gl.inline_asm_elementwise(
        PTX, "=r,=r,r,r,r,r", [copies], (gl.int8, gl.int8), is_pure=True, pack=4
    )
    return _operand_a(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True), A)


@gluon.jit
def load_multiples(stored):
    """Load the multiples of a tile's rows for one group as int32 [64, 1, 1, 1]."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, _bytes_layout(1))))
    multiples = stored.load(ROWS).to(gl.int32)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(multiples, 1), 2), 3)


@gluon.jit
def expand_multiples(words, multiples, A: gl.constexpr):
    """Convert packed words [64, 4, C] and multiples [64, 1, 1, 1] to int8 operand A [64, 32 C]."""
    C: gl.constexpr = words.shape[2]
    zeros = gl.full([64, 4, C, 4], 0, gl.int32, _bytes_layout(C))
    multiples = gl.convert_layout(multiples, _bytes_layout(C), assert_trivial=True)
    low, high = gl.inline_asm_elementwise(
        _TO_MULTIPLES,
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
        [zeros | gl.expand_dims(words, 3), zeros | multiples, zeros | _biases(multiples)],
        (gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )
    return _operand_a(low, high, A)


@gluon.jit
def _biases(multiples):
    """Return 128 - 8 m in each byte."""
    return multiples * _BIAS_STEP + _BIAS


@gluon.jit
def _operand_a(low, high, A: gl.constexpr):
    """Return bytes of low and high codes [64, 4 lanes, C, 4] as operand A [64, 32 C]."""
    C: gl.constexpr = low.shape[2]
    # [64, t, C, j, h] -> [64, C, h, t, j]
    values = gl.join(low, high).permute([0, 2, 4, 1, 3]).reshape([64, 32 * C])
    return gl.convert_layout(values, A, assert_trivial=True)
