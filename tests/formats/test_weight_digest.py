"""Digests of weights are equal exactly if the bits are equal, in every storage format."""

import hashlib
import struct

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.layouts import decode_linear, layout_of, tensor_names
from formats.quant_config import QuantConfig, find_block
from formats.scheme import Scheme
from formats.weight_digest import (
    differing,
    digests,
    rounded_digest,
    tensor_digest,
    total_digest,
    weight_digest,
)

GOLDEN = "1561d3111eb4b9d1bfb2f832e943be42878a00691b7f564c5a6f48cd1ff60cd3"


def test_digest_equals_readme_definition():
    """README.md's definition, written out."""
    tensor = torch.tensor([[1.0, -2.0]])
    stated = b" float32 [1, 2]\n" + struct.pack("<2f", 1.0, -2.0)
    assert tensor_digest(tensor) == hashlib.sha256(stated).hexdigest() == GOLDEN
    total = hashlib.sha256(b"a 1\nb 2\n").hexdigest()
    assert total_digest({"b": "2", "a": "1"}) == total


def test_digest_depends_on_shape_dtype_and_bytes():
    ones = torch.ones(2, 3)
    others = [ones.reshape(3, 2), ones.half(), ones.bfloat16(), ones * 1.0000001, ones[:1]]
    assert len({tensor_digest(each) for each in (ones, *others)}) == 6
    assert tensor_digest(torch.ones(3, 2).t()) == tensor_digest(ones)  # strides do not


def test_differing_names_are_listed():
    assert differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "3"}) == list("bcd")


@pytest.mark.parametrize(
    "scheme", ["w4a16-sym", pytest.param("w8a8", marks=pytest.mark.exhaustive)]
)
def test_trainer_and_file_digests_are_equal(scheme, docs_5m, tmp_path):
    """Float tensors rounded here have the digests of the checkpoint that `quantize` writes."""
    quantize_checkpoint(
        docs_5m, tmp_path / "q", scheme=Scheme.parse(scheme), recipe="rtn", progress=False
    )
    floats, written = CheckpointReader(docs_5m), CheckpointReader(tmp_path / "q")
    quant = QuantConfig.from_dict(find_block(tmp_path / "q", written.config))
    linears = [name for name in floats.entries if quant_scheme(quant, name) and "layers" in name]
    found = digests(
        {name: floats.get(name) for name in linears},
        {name.removesuffix(".weight"): scheme for name in linears},
    )
    assert len(found) == 28
    for name in linears:
        module = name.removesuffix(".weight")
        names = tensor_names(module, layout_of(quant), written.entries)
        weight = decode_linear(module, {f: written.get(n) for f, n in names.items()}, quant)
        assert weight_digest(weight) == found[name]
    changed = floats.get(linears[0]).clone()
    changed[0] *= 1.5
    assert rounded_digest(changed, scheme) != found[linears[0]]


def quant_scheme(quant, name):
    return name.endswith("proj.weight") and quant.scheme_for(name.removesuffix(".weight"))
