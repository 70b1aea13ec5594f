"""The golden words of formats/README.md, as literals here, in the page and in the code."""

import json
import re
from pathlib import Path

import pytest
import torch

from formats.codecs import compressed_tensors, gptq
from formats.codecs.kv_cache import kv_scale, round_kv, write_kv_scheme
from formats.families import FAMILIES
from formats.in_memory.packed import PackedWeight
from formats.numerics.bits import pack
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
def test_golden_words_equal_packer_output(bits, codes, word, int32):
    row = f"| {bits} bits: {' '.join(map(str, codes))} | {word} | {int32} |"
    assert row in README
    assert pack(torch.tensor(codes), bits).tolist() == [int32]
    assert int(word, 16) & 0xFFFFFFFF == int32 & 0xFFFFFFFF


def test_every_golden_word_is_tested():
    assert len(re.findall(r"^\| [48] bits: ", README, re.MULTILINE)) == len(WORDS)


@pytest.mark.parametrize(
    ("bits", "stored", "int32", "v2"),
    [(4, "0x77777777", 2004318071, "0x88888888"), (8, "0x7F7F7F7F", 2139062143, "0x80808080")],
)
def test_symmetric_qzeros_equal_golden_constant(bits, stored, int32, v2):
    assert f"| {bits} | {stored} | {int32} | {v2} |" in README
    spec = QuantSpec(bits=bits, symmetric=True, group_size=32)
    tensors = gptq.encode(PackedWeight.from_float(torch.randn(64, 96), spec))
    assert tensors["qzeros"].shape == (3, 64 * bits // 32)
    assert (tensors["qzeros"] == int32).all()


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_readme_worked_example(scale):
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


def test_three_bit_golden_words():
    words = pack(torch.arange(32) % 8, 3).tolist()
    assert words == [-1996831096, -964101434, -87652102]
    assert ", ".join(map(str, words)) in README


def test_readme_awq_example():
    from formats.codecs import awq

    assert "0x75316420, 1966171168" in README
    tensors = {
        "qweight": torch.full((8, 1), 1966171168, dtype=torch.int32),
        "qzeros": torch.full((1, 1), -2004318072, dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    packed = awq.decode(tensors, QuantSpec(bits=4, symmetric=False, group_size=8))
    weights = [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]
    assert packed.dequantize()[:, 0].tolist() == weights
    assert " ".join(map(str, weights)) in README
    assert all(torch.equal(awq.encode(packed)[name], tensor) for name, tensor in tensors.items())


def compressed_example(scheme: str, tensors: dict[str, torch.Tensor], weights: list[float]) -> None:
    """The tensors of a row decode to the weights on the page, which encode to the same tensors."""
    from formats.codecs import compressed_tensors

    decoded = compressed_tensors.decode(tensors, Scheme.parse(scheme))
    assert decoded.dequantize()[0].tolist() == weights
    assert " ".join(map(str, weights)) in " ".join(README.split())
    encoded = compressed_tensors.encode(decoded)
    assert encoded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert encoded[name].dtype == tensor.dtype, name
        assert bytes(encoded[name].view(torch.uint8).flatten().tolist()) == bytes(
            tensor.view(torch.uint8).flatten().tolist()
        )


def test_readme_pack_quantized_example():
    tensors = {
        "weight_packed": torch.tensor([[-2023406815]], dtype=torch.int32),
        "weight_scale": torch.tensor([[0.5]], dtype=torch.float16),
        "weight_shape": torch.tensor([1, 8]),
    }
    weights = [-3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0]
    compressed_example("w4a16-sym-g8", tensors, weights)


def test_readme_int_quantized_example():
    stored = [-128, -2, -1, 0, 1, 2, 3, 127]
    assert " ".join(map(str, stored)) in README
    tensors = {
        "weight": torch.tensor([stored], dtype=torch.int8),
        "weight_scale": torch.tensor([[0.25]], dtype=torch.float16),
    }
    compressed_example("w8a8", tensors, [value * 0.25 for value in stored])


def test_readme_float_quantized_example():
    stored = [0x38, 0x40, 0xB8, 0x7E, 0x00, 0x01, 0x08, 0xFE]
    assert " ".join(f"0x{byte:02X}" for byte in stored) in README
    tensors = {
        "weight": torch.tensor([stored], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale": torch.tensor([[0.5]]),
    }
    numbers = [1, 2, -1, 448, 0, 2**-9, 2**-6, -448]
    compressed_example("w8a8-fp8", tensors, [number * 0.5 for number in numbers])


BLOCKS = {
    "compressed-tensors": ("w8a8", ""),
    "gptq": ("w4a16-sym", "qserve-kit:0.1.0"),
    "awq": ("w4a16-asym", ""),
}


def test_readme_config_blocks_equal_written():
    blocks = [json.loads(b) for b in re.findall(r"```json\n(.*?)```", README, re.DOTALL)]
    assert [block["quant_method"] for block in blocks] == list(BLOCKS)
    for block in blocks:
        scheme, quantizer = BLOCKS[block["quant_method"]]
        schemes = {"model.layers.0.mlp.up_proj": Scheme.parse(scheme)}
        config = QuantConfig.of_modules(block["quant_method"], schemes, quantizer)
        assert config.to_dict() == block
        assert QuantConfig.from_dict(block) == config


def test_readme_fp4_bytes():
    assert (
        "an exponent of 127 the bytes 0x21 0x53 0x76 0xF8 are the weights 0.5 1.0 1.5 3.0 4.0"
        " 6.0 0.0 -6.0." in README
    )
    row = torch.zeros(1, 16, dtype=torch.uint8)
    row[0, :4] = torch.tensor([0x21, 0x53, 0x76, 0xF8], dtype=torch.uint8)
    scales = torch.full((1, 1), 127, dtype=torch.uint8)
    tensors = {"weight_packed": row, "weight_scale": scales}
    weight = compressed_tensors.decode(tensors, Scheme.parse("w4a16-mxfp4")).dequantize()
    assert weight[0, :8].tolist() == [0.5, 1.0, 1.5, 3.0, 4.0, 6.0, 0.0, -6.0]


def test_readme_q4_k_bytes():
    from formats.gguf.k_quants.grid import KGrid
    from formats.gguf.schemes import BLOCK_SCHEMES
    from formats.in_memory.k_weight import KWeight

    assert "00 38 00 34 03 00 00 00 02" in README and "-0.5 1.0 22.0" in README
    data = bytes.fromhex("003800340300000002").ljust(16, bytes(1)) + bytes([0, 1, 15]) + bytes(125)
    first = torch.tensor([[1] + [0] * 7], dtype=torch.int16)
    grid = KGrid(
        spec=BLOCK_SCHEMES["q4_k"].weight,
        d_NB=torch.tensor([[0.5]], dtype=torch.float16),
        dmin_NB=torch.tensor([[0.25]], dtype=torch.float16),
        scales_NG=first * 3,
        minima_NG=first * 2,
    )
    codes_NK = torch.zeros(1, 256, dtype=torch.uint8)
    codes_NK[0, :3] = torch.tensor([0, 1, 15])
    weight = KWeight.from_codes(codes_NK, grid)
    assert bytes(weight.bytes_NX[0].tolist()) == data
    assert weight.dequantize()[0, :3].tolist() == [-0.5, 1.0, 22.0]


def test_readme_kv_cache_example():
    (line,) = re.findall(r'^    "kv_cache_scheme": (\{.*\})$', README, re.MULTILINE)
    assert json.loads(line) == write_kv_scheme("int8")
    assert "keys within ±6.35 have k_scale 0.05 in int8; 1.0 is stored as 20" in README
    assert kv_scale(6.35, "int8") == pytest.approx(0.05)
    read_back = round_kv(torch.tensor([1.0, 7.0]), 0.05, "int8")
    assert read_back.tolist() == pytest.approx([20 * 0.05, 127 * 0.05])


def test_readme_scheme_table_equals_writable_schemes():
    from formats.layouts import LAYOUTS, default_format

    rows = re.findall(r"^\| (`w\d.*?) \| (.*?) \|$", README, re.MULTILINE)
    assert len(rows) == 11
    for names, formats in rows:
        listed = [text.split()[0] for text in formats.split(", ")]
        for name in names.split(", "):
            scheme = Scheme.parse(name.strip("`"))
            able = [row.name for row in LAYOUTS.values() if row.refuses(scheme) is None]
            assert sorted(able) == sorted(listed), name
            assert default_format(scheme) == listed[0]


def test_readme_families_equal_table():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (yes|no) \|", README, re.MULTILINE)
    assert rows == [
        (family.architecture, family.model_type, "yes" if family.served else "no")
        for family in FAMILIES.values()
    ]
