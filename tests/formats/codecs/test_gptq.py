"""GPTQ v1 tensors: there and back, and from tensors built by hand after the published layout."""

import pytest
import torch

from formats.codecs import gptq
from formats.errors import CheckpointError
from formats.in_memory.packed import PackedWeight
from formats.scheme import CHANNEL, QuantSpec


def by_hand(
    codes_NK: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros_NG: torch.Tensor,
    bits: int,
    zeros: str = "v1",
) -> dict[str, torch.Tensor]:
    """Place every code with Python integers, as the published layout says. No code of ours."""
    (out_features, in_features), num_groups = codes_NK.shape, scales_NG.shape[1]
    per_word = 32 // bits
    qweight = [[0] * out_features for _ in range(in_features // per_word)]
    qzeros = [[0] * (out_features // per_word) for _ in range(num_groups)]
    minus = 1 if zeros == "v1" else 0
    for n in range(out_features):
        for k in range(in_features):
            qweight[k // per_word][n] |= int(codes_NK[n, k]) << (bits * (k % per_word))
        for g in range(num_groups):
            qzeros[g][n // per_word] |= (int(zeros_NG[n, g]) - minus) << (bits * (n % per_word))

    def signed(rows: list[list[int]]) -> torch.Tensor:
        values = [[w - 2**32 if w >= 2**31 else w for w in row] for row in rows]
        return torch.tensor(values, dtype=torch.int32)

    return {
        "qweight": signed(qweight),
        "qzeros": signed(qzeros),
        "scales": scales_NG.t().contiguous(),
        "g_idx": torch.tensor(
            [k // (in_features // num_groups) for k in range(in_features)], dtype=torch.int32
        ),
    }


def random_parts(bits: int, symmetric: bool, num_groups: int, in_features: int = 96):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (64, in_features), generator=generator)
    scales = torch.randn(64, num_groups, generator=generator).half() + 3
    scales[::3] *= -1
    zeros = torch.randint(1, 2**bits, (64, num_groups), generator=generator).to(torch.uint8)
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    return codes, scales, zeros


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("group_size", "num_groups"), [(32, 3), (CHANNEL, 1)])
def test_encode_and_decode_equal_handmade_tensors(bits, symmetric, group_size, num_groups, version):
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=group_size)
    codes, scales, zeros = random_parts(bits, symmetric, num_groups)
    if not symmetric and version == "v1":  # it stores 0 and 2^b alike
        zeros.clamp_(2, 2**bits - 1)
    expected = by_hand(codes, scales, zeros, bits, version)
    encoded = gptq.encode(PackedWeight.from_codes(codes, scales, zeros, spec), zeros=version)
    assert encoded.keys() == set(gptq.TENSOR_NAMES)
    for field, tensor in expected.items():
        assert encoded[field].dtype == tensor.dtype, field
        assert torch.equal(encoded[field], tensor), field
        assert encoded[field].is_contiguous(), field
    decoded = gptq.decode(expected, spec, zeros=version)
    assert torch.equal(decoded.codes().long(), codes)
    assert torch.equal(decoded.scales_NG, scales)
    assert torch.equal(decoded.zeros_NG, zeros)


def test_zero_point_of_zero_is_refused_with_the_layer():
    codes, scales, zeros = random_parts(4, False, 3)
    zeros[5, 1] = 0
    spec = QuantSpec(bits=4, symmetric=False, group_size=32)
    packed = PackedWeight.from_codes(codes, scales, zeros, spec)
    with pytest.raises(CheckpointError, match=r"layers\.2\.k_proj.*minus one"):
        gptq.encode(packed, "layers.2.k_proj", "v1")
    assert torch.equal(gptq.decode(gptq.encode(packed), spec).zeros_NG, zeros)


@pytest.mark.parametrize("bits", [4, 8])
def test_all_ones_qzeros_with_v1_label_are_refused_as_ambiguous(bits):
    spec = QuantSpec(bits=bits, symmetric=False, group_size=32)
    wrapped = by_hand(*random_parts(bits, False, 3), bits)
    wrapped["qzeros"][1, 2] = -1
    with pytest.raises(CheckpointError, match="the file does not say which"):
        gptq.decode(wrapped, spec, zeros="v1")


@pytest.mark.parametrize(("label", "stored"), [("v1", 0x88888888), ("v2", 0x77777777)])
def test_constant_qzeros_of_other_version_are_refused_if_sym_is_false(label, stored):
    spec = QuantSpec(bits=4, symmetric=False, group_size=32)
    odd = by_hand(*random_parts(4, False, 3), 4)
    odd["qzeros"].fill_(stored - 2**32 if stored >= 2**31 else stored)
    with pytest.raises(CheckpointError, match="set sym to true"):
        gptq.decode(odd, spec, zeros=label)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("label", ["v1", "v2"])
@pytest.mark.parametrize("truth", ["v1", "v2"])
def test_symmetric_qzeros_decide_version_regardless_of_label(bits, label, truth):
    codes, scales, zeros = random_parts(bits, True, 3)
    spec = QuantSpec(bits=bits, symmetric=True, group_size=32)
    stored = by_hand(codes, scales, zeros, bits, truth)
    assert torch.equal(gptq.decode(stored, spec, zeros=label).zeros_NG, zeros)
    assert gptq.is_mislabelled(stored, spec, label) == (label != truth)


def tensors() -> dict[str, torch.Tensor]:
    return by_hand(*random_parts(4, True, 3), bits=4)


SYM = QuantSpec(bits=4, symmetric=True, group_size=32)


def test_missing_g_idx_is_accepted():
    without = tensors()
    del without["g_idx"]
    assert torch.equal(gptq.decode(without, SYM).words_NW, gptq.decode(tensors(), SYM).words_NW)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("qweight", None, "missing: qweight"),
        ("scales", None, "missing: scales"),
        ("qweight", torch.zeros(12, 64), "2-d int32"),
        ("qzeros", torch.zeros(24, dtype=torch.int32), "2-d int32"),
        ("qzeros", torch.zeros(3, 64, dtype=torch.int32), r"expected \[3, 8\]"),
        ("scales", torch.ones(64, 3).half(), r"expected \[3, 64\]"),
        ("scales", torch.ones(3, 64, dtype=torch.int32), "not floating point"),
        ("scales", torch.zeros(3, 64).half(), "192 of 192 are zero"),
        ("qzeros", torch.full((3, 8), 0x77777677, dtype=torch.int32), "in a symmetric scheme"),
        ("g_idx", torch.arange(96, dtype=torch.int32), "expected groups 0..2, found 0..95"),
        ("g_idx", torch.arange(96, dtype=torch.int32) - 1, "found -1..94"),
        ("g_idx", torch.zeros(96), "expected integers"),
        ("g_idx", torch.arange(64, dtype=torch.int32) // 32, r"expected \[96\], found \[64\]"),
    ],
)
def test_wrong_tensor_is_named(field, value, message):
    wrong = tensors()
    if value is None:
        del wrong[field]
    else:
        wrong[field] = value
    with pytest.raises(CheckpointError, match=message) as caught:
        gptq.decode(wrong, SYM, "layers.0.v_proj")
    assert "layers.0.v_proj" in str(caught.value)


def test_group_size_mismatch_between_config_and_tensors_is_refused():
    with pytest.raises(CheckpointError, match=r"qzeros: expected \[1, 8\]"):
        gptq.decode(tensors(), QuantSpec(bits=4, symmetric=True, group_size=96))
