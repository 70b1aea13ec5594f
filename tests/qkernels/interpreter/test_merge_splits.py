"""Merging the splits of attention, against float64."""

import pytest
import torch

from qkernels.attention.merge_splits import merge_splits
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs, to_limbs


@pytest.fixture
def parts(device):
    """(T, H, S, D) -> partials, sums, and what they are together; parts are empty as `used` says.

    used: of each head of each token, how many parts may hold something; some of them are empty too.
    """

    def make(T, H, S, D, used):
        generator = torch.Generator().manual_seed(T + H + S + D)
        partials = torch.randn(T, H, S, D, generator=generator)
        largest = torch.randn(T, H, S, generator=generator) * 20
        largest[0] -= 400  # less than any float's power of two
        weights = torch.rand(T, H, S, generator=generator) + 1
        used = torch.as_tensor(used).broadcast_to(T, H)[..., None]
        empty = torch.arange(S) >= used
        # one in three of those before the last is empty, as before a window
        empty |= (torch.rand(T, H, S, generator=generator) < 1 / 3) & (torch.arange(S) < used - 1)
        partials[empty] = float("nan")  # never written
        largest[empty], weights[empty] = float("-inf"), 0
        shift = torch.exp2((largest - largest.amax(2, keepdim=True)).double()).nan_to_num(0)
        values = partials.double().masked_fill(empty[..., None], 0)
        total = (weights * shift).sum(2)[..., None]
        want = (values * shift[..., None]).sum(2) / total.masked_fill(total == 0, 1)
        return partials.to(device), torch.stack([largest, weights]).to(device), want

    return make


def starts_of(T, device):
    return torch.arange(T + 1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("S", [2, 8, 16, 32])
@pytest.mark.parametrize("H, D", [(4, 32), (3, 80), (2, 128), (1, 256)])
def test_heads_that_use_different_splits(parts, assert_close, tolerance, device, half, H, D, S):
    used = torch.tensor([[1], [S // 2 + 1], [S], [0]]).expand(4, H).clone()
    used[1, -1] = S  # a tile of a chunk may end between the heads of a token
    partials, sums, want = parts(4, H, S, D, used)
    out = torch.full((4, H, D), float("nan"), dtype=half, device=device)
    got = merge_splits(partials, sums, starts_of(4, device), out, None)
    assert got is out and not got[3].any(), "a row that sees nothing is zero"
    assert_close("merged", want, got, tolerance(half))


@pytest.mark.parametrize("S", [4, 32])
@pytest.mark.parametrize("H, D", [(4, 32), (8, 80), (3, 128), (2, 256)])
def test_result_as_limbs(parts, assert_close, tolerance, device, half, H, D, S):
    """A step of 128 channels lies in one head or in several, which use different parts."""
    used = torch.tensor([[1], [S], [S // 2]]).expand(3, H).clone()
    used[0, -1] = S
    partials, sums, want = parts(3, H, S, D, used)
    out = torch.empty(3, H, D, dtype=half, device=device)
    limbs = merge_splits(partials, sums, starts_of(3, device), out, LimbForm(bits=4))
    assert_close("limbs", want.flatten(1), from_limbs(limbs), tolerance(half))
    assert limbs.tensor is None
    out.fill_(float("nan"))
    form = LimbForm(bits=4, with_tensor=True)
    both = merge_splits(partials, sums, starts_of(3, device), out, form)
    assert torch.equal(from_limbs(both), from_limbs(limbs))
    of_tensor = from_limbs(to_limbs(both.tensor, form))
    assert torch.equal(of_tensor, from_limbs(limbs)), "what adapters read"


def test_padding_rows_are_not_written(parts, device, half):
    partials, sums, _ = parts(3, 2, 16, 32, 16)
    out = torch.full((3, 2, 32), 7.0, dtype=half, device=device)
    merge_splits(partials, sums, torch.tensor([0, 2], dtype=torch.int32, device=device), out, None)
    assert (out[2] == 7).all() and (out[:2] != 7).any()


@pytest.mark.parametrize("at", [0, 9, 15])
def test_nan_in_any_split_propagates(parts, device, half, at):
    """Also if it is in the last split, or in the only one."""
    for used in (16, at + 1):
        partials, sums, _ = parts(1, 2, 16, 32, used)
        sums[1, 0, 0, at] = float("nan")
        out = torch.zeros(1, 2, 32, dtype=half, device=device)
        merge_splits(partials, sums, starts_of(1, device), out, None)
        assert out[0, 0].isnan().all() and torch.isfinite(out[0, 1]).all()
