"""PackedWeight: a solver's codes come back untouched, wrong input is named."""

import re
from dataclasses import replace

import pytest
import torch

from formats.errors import CheckpointError, RangeError
from formats.in_memory.packed import PackedWeight
from formats.scheme import QuantSpec, Scheme

SYM = QuantSpec(bits=4, symmetric=True, group_size=32)
ASYM = QuantSpec(bits=4, symmetric=False, group_size=32)


def random_codes(
    out_features: int = 64, in_features: int = 96
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (out_features, in_features), generator=generator)
    scales = torch.rand(out_features, in_features // 32, generator=generator) + 0.1
    return codes, scales.half()


def test_codes_round_trip_and_dequantize_by_formula():
    codes, scales = random_codes()
    zeros = torch.randint(0, 16, scales.shape)
    packed = PackedWeight.from_codes(codes, scales, zeros, ASYM)
    assert torch.equal(packed.codes().long(), codes)
    expected = scales.float().repeat_interleave(32, 1) * (codes - zeros.repeat_interleave(32, 1))
    assert torch.equal(packed.dequantize(), expected)


def test_from_float_preserves_weights_on_grid():
    codes, scales = random_codes()
    codes[:, ::32] = 0  # the extreme weight of each group has the sign with the larger range
    packed = PackedWeight.from_codes(codes, scales.double().log2().round().exp2().half(), None, SYM)
    again = PackedWeight.from_float(packed.dequantize(), SYM)
    assert torch.equal(again.dequantize(), packed.dequantize())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, s: (c + 1, s, None), "codes in 0..15, found 1..16"),
        (lambda c, s: (c - 8, s, None), "signed codes need the zero point"),
        (lambda c, s: (c.float(), s, None), "integer codes"),
        (lambda c, s: (c[0], s, None), "integer codes"),
        (lambda c, s: (c, s[:, :2], None), r"expected floating point \[64, 3\]"),
        (lambda c, s: (c, s.long(), None), "not floating point"),
        (lambda c, s: (c, s * 0, None), "are zero"),
        (lambda c, s: (c, s * float("nan"), None), "NaN or infinity"),
        (lambda c, s: (c, s, torch.full_like(s, 16)), "whole zero points in 0..15, found 16"),
        (lambda c, s: (c, s, torch.full_like(s, -1)), "whole zero points in 0..15"),
        (lambda c, s: (c, s, torch.full_like(s, 7)), "8 throughout"),
        (
            lambda c, s: (c.tolist(), s, None),
            "codes: expected a tensor, found list .torch.as_tensor",
        ),
        (lambda c, s: (c, s.numpy(), None), "scales: expected a tensor, found ndarray"),
        (lambda c, s: (c, s, 8), "zeros: expected a tensor, found int"),
        (lambda c, s: (c.to(torch.int64).add(16).to(torch.uint32), s, None), "found 16..31"),
        (lambda c, s: (c, s, torch.full_like(s, 9, dtype=torch.uint16)), "8 throughout"),
        (lambda c, s: (c, s, torch.full_like(s, 8.5)), "whole zero points in 0..15, found 8.5"),
        (lambda c, s: (c, s, torch.full_like(s, float("nan"))), "whole zero points in 0..15"),
    ],
)
def test_invalid_solver_output_is_refused(change, message):
    codes, scales = random_codes()
    with pytest.raises(CheckpointError, match=message) as caught:
        PackedWeight.from_codes(*change(codes, scales), SYM, "layers.1.gate")
    assert "layers.1.gate" in str(caught.value)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int64, torch.uint16, torch.uint32, torch.uint64],
)
def test_codes_and_zeros_accept_any_integer_dtype(dtype):
    codes, scales = random_codes()
    zeros = torch.full_like(scales, 3, dtype=dtype)
    packed = PackedWeight.from_codes(codes.to(dtype), scales, zeros, ASYM)
    assert torch.equal(packed.codes(), codes.to(torch.uint8))
    assert (packed.zeros_NG == 3).all() and packed.zeros_NG.dtype == torch.uint8


def test_learned_scales_are_detached():
    codes, scales = random_codes()
    learned = torch.nn.Parameter(scales.float())
    packed = PackedWeight.from_codes(codes, learned, learned.new_full(scales.shape, 8.0), SYM)
    assert torch.equal(packed.scales_NG, scales.float()) and not packed.scales_NG.requires_grad


def test_float8_spec_has_no_integer_codes():
    codes, scales = random_codes()
    spec = Scheme.parse("w8a8-fp8").weight
    with pytest.raises(CheckpointError, match="gate: float8 weights have no integer codes"):
        PackedWeight.from_codes(codes, scales[:, :1], None, spec, "gate")


@pytest.mark.parametrize("scale", [7e4, -7e4, 2e-8, -1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_beyond_float16_are_refused(scale, dtype):
    codes, scales = random_codes()
    scales = scales.abs().to(dtype)
    PackedWeight.from_codes(codes, scales, None, SYM).check_range()
    scales[5, 1] = scale
    packed = PackedWeight.from_codes(codes, scales, None, SYM)
    number = re.escape(f"{scales[5, 1]:.3g}")
    message = f"layers.1.gate: 1 of its {scales.numel()} scales are beyond float16.*{number}"
    with pytest.raises(RangeError, match=message):
        packed.check_range("layers.1.gate")


def test_asymmetric_spec_without_zeros_is_refused():
    with pytest.raises(CheckpointError, match="needs zero points"):
        PackedWeight.from_codes(*random_codes(), None, ASYM)


def test_merge_stacks_outputs_in_order_and_refuses_mixed_specs():
    parts = [PackedWeight.from_float(torch.randn(n, 64), SYM) for n in (64, 32, 32)]
    merged = PackedWeight.merge(parts)
    assert torch.equal(merged.dequantize(), torch.cat([part.dequantize() for part in parts]))
    merged.check()
    other = PackedWeight.from_float(torch.randn(32, 64), ASYM)
    with pytest.raises(CheckpointError, match="qkv_proj: linears merged into it differ"):
        PackedWeight.merge([*parts, other], "qkv_proj")


def test_merge_keeps_common_input_order_and_refuses_two_orders():
    """One matrix has one order: the second one's codes would meet other inputs."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    plain = [PackedWeight.from_float(torch.randn(n, 64), SYM) for n in (64, 32)]
    sorted_ = [replace(part, input_order=order) for part in plain]
    merged = PackedWeight.merge(sorted_)
    assert torch.equal(merged.dequantize(), torch.cat([part.dequantize() for part in sorted_]))
    for other in (plain[1], replace(plain[1], input_order=order.flip(0))):
        for pair in ([sorted_[0], other], [other, sorted_[0]]):
            with pytest.raises(CheckpointError, match="qkv: linears merged into it have different"):
                PackedWeight.merge(pair, "qkv")


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("bits", "wider"), [(2, 4), (3, 4), (3, 8), (6, 8), (8, 8)])
def test_widened_codes_dequantize_equal(bits, wider, symmetric):
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=32)
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (8, 64), generator=generator)
    codes[0], codes[-1] = 0, spec.max_code
    scales = (torch.rand(8, 2, generator=generator) + 0.1).half()
    zeros = None if symmetric else torch.randint(0, 2**bits, (8, 2), generator=generator)
    packed = PackedWeight.from_codes(codes, scales, zeros, spec)
    found = packed.with_bits(wider)
    found.check()
    assert found.spec == replace(spec, bits=wider)
    assert torch.equal(found.dequantize(), packed.dequantize())
