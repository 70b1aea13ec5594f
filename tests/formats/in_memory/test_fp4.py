"""4-bit floats in memory: merged weights and slices mean the same numbers."""

from dataclasses import replace

import pytest
import torch

from formats.errors import CheckpointError
from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.shards import input_units
from formats.in_memory.slices import take_inputs, take_outputs
from formats.in_memory.weights import merge
from formats.scheme import Scheme

KINDS = ("mxfp4", "nvfp4")


def make(kind, N, K, seed=0):
    weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02
    return Fp4Weight.from_float(weight_NK, Scheme.parse(f"w4a16-{kind}").weight)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_keep_their_own_global_scales(kind):
    parts = [make(kind, n, 96, seed) for seed, n in enumerate((3, 5, 1))]
    merged = merge(parts)
    merged.check()
    assert torch.equal(merged.dequantize(), torch.cat([part.dequantize() for part in parts]))
    again = merge([merged, make(kind, 2, 96, 7)])
    again.check()
    assert torch.equal(again.dequantize()[:9], merged.dequantize())
    assert torch.equal(merged.as_codes().dequantize(), merged.dequantize())


def test_equal_global_scales_stay_scalar():
    part = make("nvfp4", 3, 32)
    assert merge([part, part]).global_scale.ndim == 0


def test_multiplier_and_divisor_global_scales_do_not_merge():
    part = make("nvfp4", 3, 32)
    other = replace(part, global_scale=None, global_factor=1 / part.global_scale)
    assert torch.equal(merge([other, other]).dequantize()[3:], other.dequantize())
    with pytest.raises(CheckpointError, match="w: linears merged into it differ"):
        merge([part, other], "w")
    with pytest.raises(CheckpointError, match="w: linears merged into it differ"):
        merge([part, make("mxfp4", 3, 32)], "w")


@pytest.mark.parametrize("kind", KINDS)
def test_slices_equal_slices_of_dequantized_weight(kind):
    weight = merge([make(kind, 6, 160), make(kind, 4, 160, 1)])
    dense = weight.dequantize()
    rows = torch.tensor([9, 0, 0, 6])
    assert torch.equal(take_outputs(weight, rows).dequantize(), dense[rows])
    ranges = ((1, 3), (5, 9))
    taken = take_outputs(weight, ranges)
    taken.check()
    assert torch.equal(taken.dequantize(), torch.cat([dense[1:3], dense[5:9]]))
    taken = take_inputs(weight, 32, 128)
    taken.check()
    assert torch.equal(taken.dequantize(), dense[:, 32:128])
    with pytest.raises(CheckpointError, match="w: its inputs 8 to 39 do not begin and end"):
        take_inputs(weight, 8, 40, "w")


@pytest.mark.parametrize("kind", KINDS)
def test_shards_align_to_groups(kind):
    units = input_units(Scheme.parse(f"w4a16-{kind}"))
    assert {unit % 32 for tier in units for unit in tier} == {0}


@pytest.mark.parametrize("kind", KINDS)
def test_scale_search_beats_full_range(kind):
    """Against the scales that other tools choose: those that put the largest number on 6."""
    spec = Scheme.parse(f"w4a16-{kind}").weight
    weight_NK = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)) * 0.02
    groups = weight_NK.unflatten(1, (-1, spec.group_size))
    steps = groups.abs().amax(-1, keepdim=True) / 6
    if kind == "mxfp4":  # OCP MX v1.0: the exponent of the largest, minus that of 4
        steps = torch.exp2(groups.abs().amax(-1, keepdim=True).log2().floor() - 2)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([-table, table])
    usual = table[(groups[..., None] / steps[..., None] - table).abs().argmin(-1)] * steps
    found = Fp4Weight.from_float(weight_NK, spec).dequantize()
    usual_error = (usual.flatten(1) - weight_NK).square().sum()
    assert (found - weight_NK).square().sum() < 0.97 * usual_error


@pytest.mark.parametrize("kind", KINDS)
def test_importance_lowers_error_of_important_inputs(kind):
    spec = Scheme.parse(f"w4a16-{kind}").weight
    weight_NK = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)) * 0.02
    order = torch.randperm(256, generator=torch.Generator().manual_seed(4))
    importance_K = torch.logspace(-3, 3, 256)[order]
    plain, weighted = (
        Fp4Weight.from_float(weight_NK, spec, "w", each).dequantize() - weight_NK
        for each in (None, importance_K)
    )
    errors = [(each.square() * importance_K).sum() for each in (plain, weighted)]
    assert errors[1] < 0.95 * errors[0]
    assert plain.square().sum() < weighted.square().sum()
