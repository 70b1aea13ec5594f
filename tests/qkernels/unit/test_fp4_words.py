"""The PTX that makes weights of words of 4-bit floats, run instruction by instruction in torch.

Interpreted kernels run its plain twin, and have no bfloat16; here both dtypes meet the same words.
"""

import re

import pytest
import torch

from qkernels.wna16.unpack.fp4_layout import fp4_order, fp4_words, prepare_fp4
from tests.qkernels.fp4_case import KINDS, random_fp4

LOP3_TABLE = 0xEA  # (a & b) | c


def run_ptx(ptx, operands, dtype):
    """Results $0 to $3 of words in int64, with operands $4 to $6."""
    registers = {f"${4 + i}": operand for i, operand in enumerate(operands)}

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    for line in ptx.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, to, *sources = re.split(r"[ ,]+", line.strip())
        a, *rest = [value(each) for each in sources]
        if operation == "mov.b32":
            found = a
        elif operation == "and.b32":
            found = a & rest[0]
        elif operation == "shl.b32":
            found = (a << rest[0]) & 0xFFFFFFFF
        elif operation == "shr.u32":
            found = a >> rest[0]
        elif operation == "lop3.b32":
            assert rest[2] == LOP3_TABLE
            found = (a & rest[0]) | rest[1]
        elif operation in ("mul.f16x2", "fma.rn.bf16x2"):
            assert operation == "mul.f16x2" or rest[1] == 0x80008000
            found = sum(
                bits_of((half_of(a, e, dtype).float() * half_of(rest[0], e, dtype).float()), dtype)
                << (16 * e)
                for e in range(2)
            )
        else:
            raise AssertionError(f"{operation} is not known")
        registers[to] = found
    return [registers[f"${i}"] for i in range(4)]


def half_of(words, e, dtype):
    bits = (words >> (16 * e)) & 0xFFFF
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(dtype)


def bits_of(values, dtype):
    return values.to(dtype).view(torch.int16).long() & 0xFFFF


def weights_of(prepared):
    """The weights [N, K] that kernels make of a prepared weight, in float64."""
    spec, dtype = prepared.spec, prepared.dtype
    words = fp4_words(spec, dtype)
    packed = prepared.tensors["packed"].long() & 0xFFFFFFFF  # [N/64, steps, 64, 4, C]
    scale_bytes = prepared.tensors["scales"].contiguous().view(torch.uint8).long()
    scale_bytes = scale_bytes.view(*packed.shape[:3], words.parts, packed.shape[4])
    scales = scale_bytes * words.scale_factor + words.scale_addend
    first, second = (scales[:, :, :, part, None].expand_as(packed) for part in (0, -1))
    pairs = run_ptx(words.ptx, (packed, first, second), dtype)
    values = torch.stack(
        [torch.stack([half_of(p, e, dtype).double() for e in range(2)], -1) for p in pairs], -2
    )  # [N/64, steps, 64, t, C, 2 i + h, e]
    values = values.unflatten(-2, (2, 2)).permute(0, 2, 1, 4, 5, 6, 3, 7)
    rows_NK = values.reshape(packed.shape[0] * 64, -1)
    rows_NK = rows_NK * prepared.tensors["blocks"].double().flatten()[:, None]
    return rows_NK[: prepared.out_features, : prepared.in_features]


def test_layout_golden_word():
    """Golden: numbers 1 to 4 and 9 to 12 (as codes) at A, B, C, D of both halves."""
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    for number, (low, high) in enumerate([(1, 9), (2, 10), (3, 11), (4, 12)]):
        k = 16 * (number // 2) + 8 * (number % 2)
        codes[0, k], codes[0, k + 1] = low, high
    # A = 001 at bit 6, B = 010 at 3, C = 011 at 0, D = 100 at 9; all signs of the upper half
    half = 4 << 9 | 1 << 6 | 2 << 3 | 3
    word = (0xF000 | half) << 16 | half
    assert fp4_order(codes)[0].tolist() == [word - 2**32, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activations", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("K", [32, 96, 160, 2880])
def test_ptx_conversion_equals_weights(kind, activations, K):
    weight = random_fp4(kind, 72, K, spread=8)
    found = weights_of(prepare_fp4(weight, activations))
    if kind == "mxfp4":
        assert torch.equal(found, weight.dequantize(torch.float64))
    else:  # a divisor's reciprocal is rounded to float32
        torch.testing.assert_close(found, weight.dequantize(torch.float64), rtol=2**-22, atol=0)


@pytest.mark.parametrize("activations", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_equals_4_bits_per_weight(kind, activations):
    weight = random_fp4(kind, 128, 2880)
    prepared = prepare_fp4(weight, activations)
    stored = weight.bytes_NB.nbytes + weight.scales_NG.nbytes
    # a factor for each output, and 64 inputs of padding
    assert prepared.nbytes == stored * 2944 // 2880 + 4 * 128
