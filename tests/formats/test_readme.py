"""The golden words of formats/README.md, as literals here, in the page and in the code."""

import json
import re
from pathlib import Path

import pytest
import torch

from formats import gptq
from formats.bits import pack
from formats.packed import PackedWeight
from formats.quant_config import QuantConfig
from formats.scheme import QuantSpec, Scheme

README = (Path(__file__).parents[2] / "formats" / "README.md").read_text(encoding="utf-8")

WORDS = [
    (4, [1, 2, 3, 4, 5, 6, 7, 8], "0x87654321", -2023406815),
    (4, [8, 7, 6, 5, 4, 3, 2, 1], "0x12345678", 305419896),
    (4, [15] * 8, "0xFFFFFFFF", -1),
    (4, [0, 0, 0, 0, 0, 0, 0, 8], "0x80000000", -2147483648),
    (8, [1, 2, 3, 4], "0x04030201", 67305985),
    (8, [0, 128, 255, 127], "0x7FFF8000", 2147450880),
    (8, [0, 0, 0, 255], "0xFF000000", -16777216),
]


@pytest.mark.parametrize(("bits", "codes", "word", "int32"), WORDS)
def test_golden_word_stands_in_the_page_and_comes_out_of_the_packer(bits, codes, word, int32):
    row = f"| {bits} bits: {' '.join(map(str, codes))} | {word} | {int32} |"
    assert row in README
    assert pack(torch.tensor(codes), bits).tolist() == [int32]
    assert int(word, 16) & 0xFFFFFFFF == int32 & 0xFFFFFFFF


def test_page_has_no_golden_word_that_is_not_tested():
    assert len(re.findall(r"^\| [48] bits: ", README, re.MULTILINE)) == len(WORDS)


@pytest.mark.parametrize(
    ("bits", "stored", "int32", "v2"),
    [(4, "0x77777777", 2004318071, "0x88888888"), (8, "0x7F7F7F7F", 2139062143, "0x80808080")],
)
def test_symmetric_zeros_are_the_golden_constant(bits, stored, int32, v2):
    assert f"| {bits} | {stored} | {int32} | {v2} |" in README
    spec = QuantSpec(bits=bits, symmetric=True, group_size=32)
    tensors = gptq.encode(PackedWeight.from_float(torch.randn(64, 96), spec))
    assert tensors["qzeros"].shape == (3, 64 * bits // 32)
    assert (tensors["qzeros"] == int32).all()


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_worked_example(scale):
    words = torch.full((4, 32), -2023406815, dtype=torch.int32)
    tensors = {
        "qweight": words,
        "qzeros": torch.full((1, 4), 2004318071, dtype=torch.int32),
        "scales": torch.full((1, 32), scale, dtype=torch.float16),
    }
    packed = gptq.decode(tensors, QuantSpec(bits=4, symmetric=True, group_size=32))
    weights = packed.dequantize()[0, :8].tolist()
    assert weights == [scale * step for step in (-7, -6, -5, -4, -3, -2, -1, 0)]
    assert " ".join(str(weight + 0.0) for weight in weights) in README


def test_config_block_of_the_page_is_the_written_one():
    block = json.loads(re.search(r"```json\n(.*?)```", README, re.DOTALL)[1])
    config = QuantConfig(scheme=Scheme.parse("w4a16-sym"), quantizer="qserve-kit:0.1.0")
    assert config.to_dict() == block
    assert QuantConfig.from_dict(block) == config
