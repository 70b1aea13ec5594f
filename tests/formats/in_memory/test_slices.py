"""Parts of a decoded weight put together are the weight, code for code."""

import pytest
import torch

from formats.errors import CheckpointError, InputError
from formats.in_memory.shards import input_units, shard_extent, shard_heads
from formats.in_memory.slices import take_inputs, take_outputs
from formats.in_memory.weights import round_to_nearest, tensors_of
from formats.scheme import Scheme

N, K = 40, 192
SCHEMES = (
    "w4a16-sym-g32",
    "w4a16-asym-g64",
    "w4a16-sym-channel",
    "w8a16-asym-g32",
    "w3a16-sym-g32",
    "w8a8",
    "w8a8-fp8",
    "w8a8-fp8-static",
    "w8a8-fp8-block",
)


def made(scheme, shape=(N, K)):
    generator = torch.Generator().manual_seed(3)
    return round_to_nearest(torch.randn(shape, generator=generator), Scheme.parse(scheme).weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_output_slices_equal_dequantized_slices(scheme):
    weight = made(scheme)
    whole = weight.dequantize()
    for cut in (8, 13, 39):
        parts = [take_outputs(weight, [run]) for run in ((0, cut), (cut, N))]
        for part in parts:
            part.check()
        assert torch.equal(torch.cat([part.dequantize() for part in parts]), whole)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))[:11]
    assert torch.equal(take_outputs(weight, order).dequantize(), whole[order])
    runs = [(3, 9), (30, 40)]
    want = torch.cat([whole[a:b] for a, b in runs])
    assert torch.equal(take_outputs(weight, runs).dequantize(), want)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_input_slices_equal_dequantized_slices(scheme, size):
    weight = made(scheme)
    shards = shard_extent(K, size, input_units(Scheme.parse(scheme)))
    assert shards[0][0] == 0 and shards[-1][1] == K
    parts = [take_inputs(weight, *shard) for shard in shards]
    for part in parts:
        part.check()
    assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), weight.dequantize())


def test_block_aligned_slice_keeps_scales():
    weight = made("w8a8-fp8-block", (384, 384))
    part = take_inputs(take_outputs(weight, [(0, 128), (256, 384)]), 128, 384)
    assert part.spec == weight.spec
    assert torch.equal(part.scales_RC, weight.scales_RC[[0, 2]][:, 1:])


def test_partial_group_slice_keeps_group_scale():
    weight = made("w4a16-sym-g64")
    part = take_inputs(weight, 32, 96)
    assert part.spec.group_size == 32
    assert torch.equal(part.scales_NG, weight.scales_NG[:, :2])
    assert torch.equal(part.dequantize(), weight.dequantize()[:, 32:96])


def test_slice_starting_inside_float8_block():
    """Heads of 96 channels: the second one has inputs of both blocks of 128."""
    weight = made("w8a8-fp8-block")
    parts = [take_inputs(weight, 0, 96), take_inputs(weight, 96, 192)]
    for part in parts:
        part.check()
    assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), weight.dequantize())


def test_sorted_inputs_have_no_permutation():
    weight = made("w4a16-sym-g32")
    from dataclasses import replace

    order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    weight = replace(weight, input_order=order)
    part = take_inputs(weight, 64, 128)
    assert part.input_order is None
    assert torch.equal(part.dequantize(), weight.dequantize()[:, order[64:128]])


def test_slices_own_their_memory():
    """A view of the whole would keep all of it."""
    weight = made("w4a16-sym-g32")
    for part in (take_outputs(weight, [(0, 8)]), take_inputs(weight, 0, 64)):
        for name, tensor in tensors_of(part).items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_input_slice_not_filling_words_is_refused():
    with pytest.raises(CheckpointError, match="layer: its inputs 0 to 15 do not fill words of 32"):
        take_inputs(made("w3a16-sym-g32"), 0, 16, "layer")


@pytest.mark.parametrize(
    ("extent", "size", "group", "widths"),
    [
        (13696, 2, 128, [6912, 6784]),  # 107 groups
        (11008, 4, 128, [2816, 2816, 2688, 2688]),  # 86
        (28672, 2, 128, [14336, 14336]),
        (96, 4, 32, [32, 32, 16, 16]),  # 3 groups, cut into halves
    ],
)
def test_shard_widths_with_uneven_groups(extent, size, group, widths):
    units = input_units(Scheme.parse("w4a16-sym", group))
    assert [b - a for a, b in shard_extent(extent, size, units)] == widths


def test_shard_extents_of_heads():
    """Heads of 64 channels in groups of 128: two of them stay together where they can."""
    scheme = Scheme.parse("w4a16-sym")
    pairs = shard_heads(12, 12, 64, 4, [scheme])
    assert [shard.heads for shard in pairs] == [(0, 4), (4, 8), (8, 10), (10, 12)]
    copies = shard_heads(8, 2, 128, 4, [scheme])
    assert [(s.heads, s.kv_heads, s.is_first) for s in copies] == [
        ((0, 2), (0, 1), True),
        ((2, 4), (0, 1), False),
        ((4, 6), (1, 2), True),
        ((6, 8), (1, 2), False),
    ]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (1, 2), (4, 2**31), (4, 0), (4, -2)])
def test_kv_heads_not_dividing_heads_are_refused(heads, kv_heads):
    with pytest.raises(InputError, match=f"divisor of the {heads} attention heads, found"):
        shard_heads(heads, kv_heads, 64, 2, [None])
