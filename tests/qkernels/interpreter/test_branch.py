"""Norms and factors of a branch, and float32 weights: kernels against torch references."""

import pytest
import torch

from formats.scheme import ActivationSpec
from qkernels.operands.codes import InputRounding
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs
from qkernels.operands.split_k import SplitKPartials
from qkernels.rowwise import reference
from qkernels.rowwise.norm import norm
from qkernels.rowwise.spec import PLAIN, Branch, NormSpec

EPS, BRANCH_EPS = 1e-5, 0.3  # far apart, so that the one is not taken for the other
KINDS = ["norm", "layer norm", "factor", "both", "none"]


@pytest.fixture
def randn(device, dtype):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


def make_branch(kind, norm_C):
    of_branch = NormSpec(weight_C=norm_C, eps=BRANCH_EPS)
    layer_norm = NormSpec(kind="layer", weight_C=norm_C, bias_C=norm_C.flip(0), eps=BRANCH_EPS)
    return {
        "norm": Branch(norm=of_branch),
        "layer norm": Branch(norm=layer_norm),
        "factor": Branch(factor=0.22),
        "both": Branch(norm=of_branch, factor=-3.0),
        "none": PLAIN,
    }[kind]


def make_norm(kind, weight_C):
    """The norm after the sum: none, of the plain kind, or a layer norm of a weighted kernel."""
    if kind == "sum":
        return None
    bias_C = weight_C.flip(0) if kind == "layer" else None
    return NormSpec(kind=kind, weight_C=weight_C, bias_C=bias_C, eps=EPS)


def few_steps_apart(want, got, dtype):
    """A rounding of a normed value, up to 3, times a factor of 3, moves a sum by so much."""
    bound = (torch.finfo(dtype).eps + 1e-6) * (2 * want.double().abs() + 10)
    return ((want.double() - got.double()).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", ["rms", "layer", "sum"])
@pytest.mark.parametrize("parts", [0, 3])
def test_branch_before_the_sum(randn, device, dtype, poison, kind, after, parts):
    x, residual = randn(3, 200), 2 * randn(3, 200) + 1
    branch, spec = make_branch(kind, randn(200)), make_norm(after, randn(200))
    if parts:
        x = SplitKPartials(parts=torch.stack([randn(3, 200).float()] * parts), dtype=dtype)
    want, want_total = reference.norm(x, residual, spec, None, branch)
    got, total = norm(x, residual, spec, None, branch)
    assert few_steps_apart(want_total, total, dtype)
    assert few_steps_apart(want, got, dtype)
    if after == "sum":
        assert got is total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", ["rms", "layer", "sum"])
def test_branch_before_the_sum_and_rounding_to_codes(randn, device, half, kind, after):
    x, residual = randn(3, 200).to(half), (2 * randn(3, 200) + 1).to(half)
    branch = make_branch(kind, randn(200).to(half))
    spec, form = make_norm(after, randn(200).to(half)), InputRounding(ActivationSpec(), None)
    (want, want_scales), want_total = reference.norm(x, residual, spec, form, branch)
    (got, scales), total = norm(x, residual, spec, form, branch)
    assert few_steps_apart(want_total, total, half)
    assert few_steps_apart(want_scales, scales, half)
    # The branch is rounded between its parts: a last bit of bfloat16 is a whole code.
    most, share = (2, 0.2) if half is torch.bfloat16 else (1, 0.1)
    assert (want.int() - got.int()).abs().max() <= most
    assert (want != got).float().mean() < share


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", ["rms", "layer", "sum"])
@pytest.mark.parametrize("C", [256, 1280])
def test_branch_before_the_sum_and_limbs(device, half, kind, after, C):
    generator = torch.Generator().manual_seed(2)
    x, residual, of_branch, weight = (
        torch.randn(*shape, generator=generator).to(device, half)
        for shape in ((3, C), (3, C), (C,), (C,))
    )
    branch, form = make_branch(kind, of_branch), LimbForm(bits=8, with_sums=True)
    spec = make_norm(after, weight)
    want, want_total = reference.norm(x, residual, spec, None, branch)
    got, total = norm(x, residual, spec, form, branch)
    assert few_steps_apart(want_total, total, half)
    assert few_steps_apart(want, from_limbs(got), half)


def gemma_norm(x, weight_C, eps):
    """Rounded once, after the weight."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_C


def test_float32_weight_is_multiplied_before_rounding(half, device):
    """Rounded before it as well, about a third of the results would differ."""
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(16, 512, generator=generator).to(device, half) for _ in range(2))
    weight = (1 + torch.randn(512, generator=generator) / 8).to(device)
    total = x + residual
    want = gemma_norm(total, weight, EPS).to(half)
    twice = (gemma_norm(total, 1, EPS).to(half) * weight).to(half)
    form = LimbForm(bits=8, with_sums=True)
    spec = NormSpec(weight_C=weight, eps=EPS)
    found = {
        "reference": reference.norm(x, residual, spec)[0],
        "norm": norm(x, residual, spec)[0],
        "first norm": norm(total, None, spec)[0],
        "limbs": from_limbs(norm(x, residual, spec, form)[0]),
    }
    for name, got in found.items():
        shares = [float((got.to(half) != each).float().mean()) for each in (want, twice)]
        assert shares[0] < 0.02 and shares[1] > 0.1, (name, shares)
    (codes, scales), _ = norm(x, residual, spec, InputRounding(ActivationSpec(), None))
    wanted = reference.quantize_input(want, ActivationSpec())
    assert (codes != wanted[0]).float().mean() < 0.01
    assert (scales != wanted[1]).float().mean() < 0.2
