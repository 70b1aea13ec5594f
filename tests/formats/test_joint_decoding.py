"""Linears decoded together are those decoded one by one, bit for bit."""

from dataclasses import replace

import pytest
import torch

from formats import joint_decoding
from formats.errors import CheckpointError
from formats.gguf.staged import BLOCKS
from formats.in_memory.k_weight import KWeight
from formats.in_memory.weights import round_to_nearest, same_weight
from formats.joint_decoding import decode_together
from formats.layouts import LAYOUTS, decode_linear, encode_linear
from formats.quant_config import QuantConfig
from formats.scheme import BLOCK_TYPES, Scheme, block_scheme

NAMES = [f"model.layers.0.mlp.experts.{number}.up_proj" for number in range(3)]
TOGETHER = [
    *[("gptq", scheme) for scheme in ("w4a16-sym", "w8a16-sym", "w3a16-sym-g32", "w4a16-asym")],
    *[("awq", scheme) for scheme in ("w4a16-sym", "w4a16-asym")],
    *[
        ("compressed-tensors", scheme)
        for scheme in (
            *("w4a16-sym", "w4a16-asym", "w8a8", "w8a8-fp8", "w8a8-fp8-block", "w4a8"),
            *("w4a16-mxfp4", "w8a8-mxfp8"),
        )
    ],
]


def stored(method, text, shape=(256, 256), count=3):
    """Return (tensors of random linears, their config)."""
    torch.manual_seed(3)
    scheme = Scheme.parse(text)
    names = NAMES[:count]
    config = QuantConfig.of_modules(method, dict.fromkeys(names, scheme))
    tensors = {
        name: encode_linear(
            round_to_nearest(torch.randn(shape), scheme.weight), scheme, LAYOUTS[method], name
        )
        for name in names
    }
    return tensors, config


@pytest.mark.parametrize(("method", "scheme"), TOGETHER)
def test_joint_decode_equals_separate_decode(method, scheme):
    tensors, config = stored(method, scheme)
    found = decode_together(tensors, config)
    assert found is not None and len(found) == len(NAMES)
    for name, weight in zip(NAMES, found, strict=True):
        want = decode_linear(name, tensors[name], config)
        assert same_weight(weight, want) is None
        assert (weight.spec, weight.activation) == (want.spec, want.activation)
        assert (weight.out_features, weight.in_features) == (256, 256)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_of_a_gguf_file_are_decoded_together(kind):
    """Experts of a GGUF file are one tensor, which is presented as a linear for each expert."""
    scheme, generator = block_scheme(kind), torch.Generator().manual_seed(3)
    block = {"quant_method": "gguf", "form": kind, "modules": [], "types": {}, "lm_head": False}
    config = QuantConfig.from_dict(block)
    want = [KWeight.random((24, 256), scheme.weight, 0.02, generator) for _ in NAMES]
    tensors = {name: {BLOCKS: weight.bytes_NX} for name, weight in zip(NAMES, want, strict=True)}
    found = decode_together(tensors, config)
    assert [same_weight(*pair) for pair in zip(found, want, strict=True)] == [None] * 3
    tensors[NAMES[1]][BLOCKS] = torch.full_like(want[1].bytes_NX, 255)  # scales are no numbers
    assert decode_together(tensors, config) is None


def test_common_input_order_is_kept():
    tensors, config = stored("gptq", "w4a16-sym")
    config = replace(config, act_order=True)
    g_idx = torch.arange(256, dtype=torch.int32).flip(0) // 128
    for linear in tensors.values():
        linear["g_idx"] = g_idx.clone()
    found = decode_together(tensors, config)
    for name, weight in zip(NAMES, found, strict=True):
        assert same_weight(weight, decode_linear(name, tensors[name], config)) is None
    tensors[NAMES[1]]["g_idx"] = g_idx.flip(0).contiguous()
    assert decode_together(tensors, config) is None, "another order than the others"


def test_per_tensor_scales_are_not_decoded_jointly():
    """Each linear has its own scale, which the joint linear could not hold."""
    tensors, config = stored("compressed-tensors", "w4a16-nvfp4")
    scales = {float(linear["weight_global_scale"]) for linear in tensors.values()}
    assert len(scales) == 3
    assert decode_together(tensors, config) is None
    for linear in tensors.values():
        linear["weight_global_scale"] = torch.tensor([2.0])
    found = decode_together(tensors, config)
    for name, weight in zip(NAMES, found, strict=True):
        assert same_weight(weight, decode_linear(name, tensors[name], config)) is None


@pytest.mark.parametrize("rows", [96, 192])
def test_partial_blocks_are_not_decoded_jointly(rows):
    tensors, config = stored("compressed-tensors", "w8a8-fp8-block", (rows, 256))
    assert decode_together(tensors, config) is None


@pytest.mark.parametrize(
    ("scheme", "rows", "count"),
    [("w4a16-asym", 6, 3), ("w4a16-asym", 7, 2), ("w8a16-asym", 3, 3), ("w6a16-asym", 14, 2)],
)
def test_zero_points_ending_inside_word_are_not_decoded_jointly(scheme, rows, count):
    """The words of all linears have the shape of the joint linear's words, but other bits."""
    tensors, config = stored("compressed-tensors", scheme, (rows, 256), count)
    found = decode_together(tensors, config) or [
        decode_linear(name, own, config) for name, own in tensors.items()
    ]
    for (name, own), weight in zip(tensors.items(), found, strict=True):
        assert same_weight(weight, decode_linear(name, own, config)) is None


def test_joint_decode_leaves_errors_to_separate_decode():
    """The joint linear has no name; the caller finds the wrong one by decoding each alone."""
    tensors, config = stored("compressed-tensors", "w4a16-sym")
    tensors[NAMES[1]]["weight_scale"][3, 0] = float("nan")
    assert decode_together(tensors, config) is None
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj scales"):
        decode_linear(NAMES[1], tensors[NAMES[1]], config)


def test_different_linears_are_not_decoded_jointly():
    tensors, config = stored("gptq", "w4a16-sym")
    other, _ = stored("gptq", "w4a16-sym", (128, 256))
    assert decode_together(tensors | {NAMES[2]: other[NAMES[2]]}, config) is None
    mixed = QuantConfig.of_modules(
        "compressed-tensors",
        {NAMES[0]: Scheme.parse("w4a16-sym"), NAMES[1]: Scheme.parse("w8a16-sym")},
    )
    assert decode_together(dict.fromkeys(NAMES[:2], {}), mixed) is None
    without = {field: t for field, t in tensors[NAMES[0]].items() if field != "g_idx"}
    assert decode_together(tensors | {NAMES[0]: without}, config) is None


def test_joint_decode_makes_one_call(monkeypatch):
    tensors, config = stored("gptq", "w4a16-sym")
    calls, decode = [], joint_decoding.decode_linear
    monkeypatch.setattr(
        joint_decoding, "decode_linear", lambda *given: calls.append(given[0]) or decode(*given)
    )
    assert decode_together(tensors, config) is not None
    assert calls == NAMES[:1]
