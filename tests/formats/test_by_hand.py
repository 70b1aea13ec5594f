"""Tensors that Python integers built after the published layouts: one for each variant we read.

No encoder of ours is used here, so that a mistake shared by reader and writer must show. Legend: N
outputs, K inputs, G groups.
"""

import pytest
import torch

from formats.codecs import awq, compressed_tensors, gptq
from formats.layouts import decode_linear
from formats.quant_config import QuantConfig
from formats.scheme import CHANNEL, FIXED_SCHEMES, QuantSpec, Scheme

N, K, L = 64, 96, 32
G = K // L
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def signed(words: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[w - 2**32 if w >= 2**31 else w for w in row] for row in words]).int()


def bit_stream(codes: list[int], bits: int) -> list[int]:
    """Codes as one long integer, lowest first, cut into words."""
    total = sum(code << (bits * i) for i, code in enumerate(codes))
    return [total >> (32 * i) & 0xFFFFFFFF for i in range(-(-len(codes) * bits // 32))]


def rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return signed([bit_stream(row, bits) for row in codes.tolist()])


def awq_rows(codes: torch.Tensor) -> torch.Tensor:
    words = []
    for row in codes.tolist():
        words.append(
            [
                sum(row[8 * j + AWQ_ORDER[i]] << (4 * i) for i in range(8))
                for j in range(len(row) // 8)
            ]
        )
    return signed(words)


def parts(bits: int, symmetric: bool, num_groups: int = G, low: int = 0, dtype=torch.float16):
    generator = torch.Generator().manual_seed(bits + num_groups)
    codes = torch.randint(0, 2**bits, (N, K), generator=generator)
    zeros = torch.randint(low, 2**bits, (N, num_groups), generator=generator)
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    scales = (torch.randn(N, num_groups, generator=generator) + 3).to(dtype)
    return codes, scales, zeros


def weights(codes, scales, zeros, g_idx=None) -> torch.Tensor:
    """W[n, k] = s * (q - z), with the group of each input looked up."""
    if g_idx is None:
        g_idx = torch.arange(K) // (K // scales.shape[1])
    return scales.float()[:, g_idx] * (codes - zeros[:, g_idx]).float()


def gptq_tensors(codes, scales, zeros, bits, version, g_idx=None) -> dict[str, torch.Tensor]:
    stored = (zeros - int(version == "v1")) % 2**bits
    tensors = {
        "qweight": rows(codes, bits).t().contiguous(),
        "qzeros": rows(stored.t(), bits),
        "scales": scales.t().contiguous(),
    }
    return tensors if g_idx is None else {**tensors, "g_idx": g_idx.int()}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gptq_equals_handmade(bits, symmetric, version, dtype):
    codes, scales, zeros = parts(bits, symmetric, low=1 if version == "v1" else 0, dtype=dtype)
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=L)
    packed = gptq.decode(gptq_tensors(codes, scales, zeros, bits, version), spec, zeros=version)
    assert torch.equal(packed.codes().long(), codes)
    assert packed.scales_NG.dtype == dtype
    assert torch.equal(packed.dequantize(), weights(codes, scales, zeros))


GROUP_INDEXES = {
    "a permutation": torch.randperm(K, generator=torch.Generator().manual_seed(1)) % G,
    "in order": torch.arange(K) // L,
    "reversed": (K - 1 - torch.arange(K)) // L,
    "uneven groups": torch.tensor([0] * 20 + [2] * 60 + [1] * 16),
    "a group of one": torch.tensor([1] + [0] * 31 + [2] * 64),
    "an empty group": torch.tensor([2, 0] * 48),
    "one group": torch.full((K,), 1),
}


@pytest.mark.parametrize("kind", GROUP_INDEXES)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptq_with_permuted_inputs_equals_handmade(kind, bits):
    g_idx = GROUP_INDEXES[kind]
    codes, scales, zeros = parts(bits, False, low=1)
    spec = QuantSpec(bits=bits, symmetric=False, group_size=L)
    stored = gptq_tensors(codes, scales, zeros, bits, "v2", g_idx)
    packed = gptq.decode(stored, spec, zeros="v2")
    assert torch.equal(packed.dequantize(), weights(codes, scales, zeros, g_idx))
    sorted_already = kind in ("in order", "one group")
    assert (packed.input_order is None) == sorted_already, "an identity must be dropped"
    if kind in ("a permutation", "in order", "reversed"):
        assert packed.spec == spec
        again = gptq.encode(packed, zeros="v2")
        for field, tensor in stored.items():
            assert torch.equal(again[field], tensor), field


def test_gptq_partial_group():
    spec = QuantSpec(bits=4, symmetric=True, group_size=64)
    codes, scales, zeros = parts(4, True, num_groups=2)
    packed = gptq.decode(gptq_tensors(codes, scales, zeros, 4, "v1"), spec, zeros="v1")
    expected = weights(codes, scales, zeros, torch.arange(K) // 64)
    assert torch.equal(packed.dequantize(), expected)


@pytest.mark.parametrize("kind", ["asymmetric", "symmetric", "symmetric without zeros"])
def test_awq_equals_handmade(kind):
    codes, scales, zeros = parts(4, kind != "asymmetric")
    tensors = {
        "qweight": awq_rows(codes.t()),
        "qzeros": awq_rows(zeros.t()),
        "scales": scales.t().contiguous(),
    }
    if kind == "symmetric without zeros":
        del tensors["qzeros"]
    spec = QuantSpec(bits=4, symmetric=kind != "asymmetric", group_size=L)
    packed = awq.decode(tensors, spec)
    assert torch.equal(packed.codes().long(), codes)
    assert torch.equal(packed.dequantize(), weights(codes, scales, zeros))
    encoded = awq.encode(packed)
    assert all(torch.equal(encoded[field], tensor) for field, tensor in tensors.items())


@pytest.mark.parametrize("keys", ["new", "old"])
def test_awq_key_spellings(keys):
    codes, scales, zeros = parts(4, False)
    tensors = {"qweight": awq_rows(codes.t()), "qzeros": awq_rows(zeros.t()), "scales": scales.t()}
    block = {"bits": 4, "group_size": L} if keys == "new" else {"w_bit": 4, "q_group_size": L}
    config = QuantConfig.from_dict({"quant_method": "awq", "zero_point": True, **block})
    weight = decode_linear("model.layers.0.mlp.up_proj", tensors, config)
    assert torch.equal(weight.dequantize(), weights(codes, scales, zeros))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_groups", [G, 1])
@pytest.mark.parametrize("act_order", [False, True])
def test_pack_quantized_equals_handmade(bits, symmetric, num_groups, act_order):
    codes, scales, zeros = parts(bits, symmetric, num_groups)
    tensors = {
        "weight_packed": rows(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([N, K]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = rows(zeros.t(), bits).t().contiguous()
    g_idx = None
    if act_order:
        g_idx = torch.randperm(K, generator=torch.Generator().manual_seed(2)) % num_groups
        tensors["weight_g_idx"] = g_idx.int()
    group_size = L if num_groups > 1 else CHANNEL
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=group_size)
    weight = compressed_tensors.decode(tensors, Scheme(weight=spec))
    assert torch.equal(weight.dequantize(), weights(codes, scales, zeros, g_idx))


@pytest.mark.parametrize("shape", ["[N, 1]", "[N]", "scalar"])
@pytest.mark.parametrize("name", ["w8a8", "w8a8-static"])
def test_int_quantized_equals_handmade(shape, name):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (N, K), generator=generator).to(torch.int8)
    scales = {
        "[N, 1]": torch.rand(N, 1, generator=generator) + 0.1,
        "[N]": torch.rand(N, generator=generator) + 0.1,
        "scalar": torch.tensor(0.25),
    }[shape]
    tensors = {"weight": weight, "weight_scale": scales}
    if name == "w8a8-static":
        tensors["input_scale"] = torch.tensor([0.5])
    decoded = compressed_tensors.decode(tensors, FIXED_SCHEMES[name])
    assert torch.equal(decoded.dequantize(), weight.float() * scales.reshape(-1, 1))
    assert decoded.scheme == FIXED_SCHEMES[name]
    assert (decoded.input_scale == 0.5) if name == "w8a8-static" else decoded.input_scale is None


def test_int_quantized_with_zero_points_equals_handmade():
    codes, scales, zeros = parts(8, False)
    tensors = {
        "weight": (codes - 128).to(torch.int8),
        "weight_scale": scales,
        "weight_zero_point": (zeros - 128).to(torch.int8),
    }
    spec = QuantSpec(bits=8, symmetric=False, group_size=L)
    decoded = compressed_tensors.decode(tensors, Scheme(weight=spec))
    assert torch.equal(decoded.dequantize(), weights(codes, scales, zeros))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("w8a8-fp8", (200, 1)),
        ("w8a8-fp8-static", ()),
        ("w8a8-fp8-static", (1,)),
        ("w8a8-fp8-block", (2, 3)),
        ("w8a16-fp8", (200, 1)),
    ],
)
def test_float_quantized_equals_handmade(name, shape):
    """[200, 300]: the last block of each row and column is smaller."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=generator) + 0.1
    tensors = {"weight": weight, "weight_scale": scales}
    if name == "w8a8-fp8-static":
        tensors["input_scale"] = torch.tensor(0.5)
    decoded = compressed_tensors.decode(tensors, FIXED_SCHEMES[name])
    table = scales.reshape(shape if len(shape) == 2 else (1, 1))
    rows_per, columns_per = -(-200 // table.shape[0]), -(-300 // table.shape[1])
    if name == "w8a8-fp8-block":
        rows_per = columns_per = 128
    expected = torch.empty(200, 300)
    for n in range(200):
        for block in range(table.shape[1]):
            part = slice(block * columns_per, (block + 1) * columns_per)
            expected[n, part] = weight[n, part].float() * table[n // rows_per, block]
    assert torch.equal(decoded.dequantize(), expected)


def test_gptq_w8a8_profile_equals_int_quantized():
    codes, scales, zeros = parts(8, True, num_groups=1)
    block = {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": -1,
        "desc_act": False,
        "sym": True,
        "qserve": {"act": {"bits": 8, "dynamic": True, "per": "token"}},
    }
    tensors = gptq_tensors(codes, scales, zeros, 8, "v1")
    assert (tensors["qzeros"] == 0x7F7F7F7F).all()
    weight = decode_linear("model.layers.0.mlp.up_proj", tensors, QuantConfig.from_dict(block))
    assert str(weight.scheme) == "w8a8"
    int8 = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    other = compressed_tensors.decode(int8, FIXED_SCHEMES["w8a8"])
    assert torch.equal(weight.codes(), other.codes())
    assert torch.equal(weight.scales_NG, other.scales_NG)
