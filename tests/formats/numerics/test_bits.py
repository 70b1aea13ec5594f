"""Bit packing against a bit stream made of one big integer."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import SchemeError
from formats.numerics import bits as bits_module
from formats.numerics.bits import pack, packed_length, unpack


def slow_pack(codes: list[int], bits: int) -> list[int]:
    """Code i at bits [i*b, (i+1)*b) of one integer; its 32-bit digits, lowest first, as int32."""
    stream = sum(code << (i * bits) for i, code in enumerate(codes))
    words = [(stream >> (32 * j)) & 0xFFFFFFFF for j in range(len(codes) * bits // 32)]
    return [word - 2**32 if word >> 31 else word for word in words]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), bits=st.integers(2, 8), periods=st.integers(1, 3), dim=st.integers(-2, 1))
def test_bit_stream_equal_for_every_width_and_dimension(data, bits, periods, dim):
    rows, columns = 3, 32 * periods
    flat = data.draw(
        st.lists(st.integers(0, 2**bits - 1), min_size=rows * columns, max_size=rows * columns)
    )
    codes = torch.tensor(flat, dtype=torch.uint8).view(rows, columns)
    expected = torch.tensor([slow_pack(row, bits) for row in codes.tolist()], dtype=torch.int32)
    words = pack(codes.t(), bits, dim=dim).t() if dim in (0, -2) else pack(codes, bits, dim=dim)
    assert words.dtype == torch.int32
    assert torch.equal(words, expected)
    for few in (0, bits_module.FEW_WORDS):  # code by code, or in one pass
        with mock.patch.object(bits_module, "FEW_WORDS", few):
            assert torch.equal(unpack(words, bits), codes)
            assert torch.equal(unpack(words.t(), bits, dim=0), codes.t())


@pytest.mark.parametrize("bits", range(2, 9))
def test_all_ones_word_keeps_sign_bit(bits):
    codes = torch.full((1, 32), 2**bits - 1, dtype=torch.uint8)
    assert (pack(codes, bits) == -1).all()
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


def test_codes_not_filling_words_are_refused():
    with pytest.raises(SchemeError, match="divisible by 8"):
        packed_length(12, 4)
    with pytest.raises(SchemeError, match="divisible by 32"):
        pack(torch.zeros(16, dtype=torch.uint8), 3)
    with pytest.raises(SchemeError, match="divisible by 3"):
        unpack(torch.zeros(4, dtype=torch.int32), 3)
