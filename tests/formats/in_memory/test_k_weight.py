"""Weights in blocks of a GGUF file: codes and grid, shards, damaged blocks."""

import pytest
import torch

from formats.errors import CheckpointError
from formats.in_memory.k_weight import KWeight
from formats.in_memory.shards import input_units, shard_features
from formats.in_memory.slices import take_inputs, take_outputs
from formats.in_memory.weights import merge
from formats.scheme import BLOCK_TYPES, block_scheme


def made(kind, shape=(24, 768)):
    generator = torch.Generator().manual_seed(3)
    return KWeight.random(shape, block_scheme(kind).weight, 0.02, generator)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_codes_and_grid_dequantize_to_weight(kind):
    """The decoder of the blocks, which gguf-py's golden values pin, has the same numbers."""
    weight = made(kind)
    codes_NK, grid = weight.codes_and_grid()
    zero = {"q6_k": 32, "q3_k": 4, "iq4_xs": 128}.get(kind, 0)
    groups_NGL = codes_NK.float().unflatten(1, (-1, grid.length)) - zero
    found = groups_NGL * grid.steps()[..., None]
    if grid.has_minima:
        found = found - grid.lows()[..., None]
    assert torch.equal(found.flatten(1), weight.dequantize())
    assert 0.01 < float(weight.dequantize().std()) < 0.04


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_shards_concatenate_to_weight(kind):
    weight = made(kind)
    whole = weight.dequantize()
    for cut in (32, 256, 352):
        left, right = take_inputs(weight, 0, cut), take_inputs(weight, cut, 768)
        assert torch.equal(torch.cat([left.dequantize(), right.dequantize()], 1), whole)
        again = take_inputs(right, 64, 128)
        assert torch.equal(again.dequantize(), whole[:, cut + 64 : cut + 128])
        assert left.bytes_NX.shape[1] < weight.bytes_NX.shape[1]
    parts = [take_outputs(weight, [rows]) for rows in ((0, 9), (9, 24))]
    assert torch.equal(merge(parts).dequantize(), whole)


def test_shards_align_to_blocks():
    scheme = block_scheme("q4_k")
    assert min(input_units(scheme)[1]) == 32
    assert shard_features("down", 768, 3, scheme) == ((0, 256), (256, 512), (512, 768))
    assert shard_features("down", 256, 2, scheme) == ((0, 128), (128, 256))
    with pytest.raises(CheckpointError, match="o: its inputs 16 to 255 do not begin"):
        take_inputs(made("q4_k"), 16, 256, "o")


def test_different_block_types_are_not_merged():
    with pytest.raises(
        CheckpointError, match="qkv: linears merged into it differ: q4_k against q6_k"
    ):
        merge([made("q4_k"), made("q6_k")], "qkv")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_nan_scales_are_refused(kind):
    weight = made(kind)
    weight.check()
    at = {"q6_k": 208, "q2_k": 82, "q3_k": 108, "iq4_xs": 0}.get(kind, 2)
    weight.bytes_NX.view(-1, weight.kind.num_bytes)[5, at + 1] |= 0x7C
    weight.bytes_NX.view(-1, weight.kind.num_bytes)[5, at + 1] &= 0x7F
    with pytest.raises(CheckpointError, match="v_proj: the scales of its blocks contain NaN"):
        weight.check("v_proj")
