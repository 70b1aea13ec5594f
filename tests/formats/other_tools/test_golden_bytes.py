"""Bytes of bitsandbytes, torchao and HQQ decode to the golden values of formats/README.md."""

import json
from pathlib import Path

import torch

from formats.other_tools import bitsandbytes, hqq, torchao
from formats.scheme import QuantSpec, Scheme

STATE = "weight.quant_state.bitsandbytes__nf4"

README = (Path(__file__).parents[3] / "formats" / "README.md").read_text(encoding="utf-8")
README = " ".join(README.split())  # a golden line may be wrapped


def floats(text: str) -> list[float]:
    """The numbers of a golden line, which formats/README.md has word for word."""
    assert text in README
    return [float(number) for number in text.split()]


def test_bitsandbytes_4_bit_golden_bytes():
    assert "0x12 0x3F are the weights" in README
    values = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 2]}
    tensors = {
        "weight": torch.tensor([[0x12], [0x3F]], dtype=torch.uint8),
        "weight.absmax": torch.tensor([2.0]),
        "weight.quant_map": torch.arange(16) / 8,
        STATE: torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8),
    }
    found = bitsandbytes.decode_4bit(tensors, bitsandbytes.four_bit_spec("nf4"), "q")
    assert found.dequantize().flatten().tolist() == floats("0.25 0.5 0.75 3.75")


def test_bitsandbytes_8_bit_golden_bytes():
    codes = torch.tensor([[1, -127, 0, 0]], dtype=torch.int8)
    tensors = {"weight": codes, "SCB": torch.tensor([254.0])}
    found = bitsandbytes.decode_8bit(tensors, bitsandbytes.EIGHT_BIT_SPEC, "q").dequantize()
    assert found.flatten().tolist() == [*floats("2.0 -254.0"), 0, 0]


def test_torchao_int4_golden_bytes():
    """Codes are two's complement, the even input in the low half of its byte."""
    tensors = {
        torchao.DATA: torch.tensor([[0x78]], dtype=torch.uint8).view(torch.int8),
        torchao.SCALE: torch.tensor([[0.5]]),
        torchao.ZERO: torch.tensor([[0.25]]),
    }
    spec = QuantSpec(bits=4, symmetric=False, group_size=2, type="floatzero")
    found = torchao.decode(tensors, Scheme(weight=spec), "q").dequantize()
    assert found.flatten().tolist() == floats("-3.75 3.75")


def test_torchao_tile_golden_words():
    """The first word of a tile holds the first inputs of its first row."""
    assert "0x76543210 of the first lane" in README
    words = torch.full((1, 1, 32, 1), -2004318072, dtype=torch.int32)  # codes of 8
    words[0, 0, 0, 0] = 0x76543210
    tensors = {
        torchao.DATA: words,
        torchao.SCALE_AND_ZERO: torch.tensor([0.5, 0.25]).expand(1, 8, 2),
    }
    spec = QuantSpec(bits=4, symmetric=False, group_size=32, type="floatzero")
    found = torchao.decode(tensors, Scheme(weight=spec), "q").dequantize()
    places = [0, 8, 16, 24, 1, 9, 17, 25]
    assert found[0, places].tolist() == floats("-3.75 -3.25 -2.75 -2.25 -1.75 -1.25 -0.75 -0.25")
    found[0, places] = 0.25
    assert bool((found == 0.25).all()) and found.shape == (8, 32)


def test_torchao_tile_lane_holds_every_fourth_pair():
    words = torch.zeros(2, 3, 32, 4, dtype=torch.int32)
    words[1, 2, 14, 3] = 1 << 20  # lane 14: row 3 and pair 2; nibble 5: odd input, second eight
    codes = torchao.unpack_tiles(words, "q")
    assert codes.shape == (16, 384)
    assert codes.nonzero().tolist() == [[8 + 3, 2 * 128 + 3 * 32 + 8 + 2 * 2 + 1]]


def test_torchao_int4_scales_are_groups_by_outputs():
    codes = torch.tensor([[-8, -1, 0, 7], [1, 2, 3, 4]])
    scales = torch.tensor([[0.5, 1.0], [2.0, 4.0]])  # [G, N]
    zeros = torch.tensor([[0.25, 0.0], [-1.0, 8.0]])
    low, high = codes[:, 0::2] & 15, codes[:, 1::2] & 15
    tensors = {
        torchao.DATA: (low | high << 4).to(torch.uint8).view(torch.int8),
        torchao.SCALE: scales,
        torchao.ZERO: zeros,
    }
    spec = QuantSpec(bits=4, symmetric=False, group_size=2, type="floatzero")
    found = torchao.decode(tensors, Scheme(weight=spec), "q").dequantize()
    assert found.tolist() == [[-3.75, -0.25, -1.0, 13.0], [1.0, 2.0, 20.0, 24.0]]


def test_hqq_golden_codes():
    tensors = {
        hqq.CODES: torch.tensor([[0x21, 0x43]], dtype=torch.uint8),
        "scale": torch.tensor([[0.5], [1.0]]),
        "zero": torch.tensor([[1.5], [0.5]]),
        "shape": torch.tensor([2, 2]),
        "axis": torch.tensor(1),
        "nbits": torch.tensor(4),
    }
    spec = QuantSpec(bits=4, symmetric=False, group_size=2, type="floatzero")
    found = hqq.decode(tensors, spec, "q").dequantize()
    assert "0.25 1.25 and 0.5 2.5" in README
    assert found.tolist() == [[0.25, 1.25], [0.5, 2.5]]
