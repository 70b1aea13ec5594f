"""Norms behind a branch, factors, float32 weights and GELU: kernels against their torch twins."""

import pytest
import torch

from formats.scheme import ActivationSpec
from qkernels import ops
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs
from qkernels.operands.split_k import SplitKPartials
from qkernels.rowwise import norm_act, reference
from qkernels.rowwise import norm_act_limbs as fused_limbs
from qkernels.rowwise import norm_act_quantize as fused_quant
from qkernels.rowwise.branch import PLAIN, Branch

EPS, BRANCH_EPS = 1e-5, 0.3  # far apart, so that the one is not taken for the other
KINDS = ["norm", "factor", "both", "none"]


@pytest.fixture
def randn(device, dtype):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


def make_branch(kind, norm_C):
    return {
        "norm": Branch(norm_C=norm_C, eps=BRANCH_EPS),
        "factor": Branch(factor=0.22),
        "both": Branch(norm_C=norm_C, eps=BRANCH_EPS, factor=-3.0),
        "none": PLAIN,
    }[kind]


def few_steps_apart(want, got, dtype):
    """A rounding of a normed value, up to 3, times a factor of 3, moves a sum by so much."""
    bound = (torch.finfo(dtype).eps + 1e-6) * (2 * want.double().abs() + 10)
    return ((want.double() - got.double()).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("parts", [0, 3])
def test_branch_before_the_sum(randn, device, dtype, poison, kind, weighted, parts):
    x, residual = randn(3, 200), 2 * randn(3, 200) + 1
    branch, weight = make_branch(kind, randn(200)), randn(200) if weighted else None
    if parts:
        x = SplitKPartials(parts=torch.stack([randn(3, 200).float()] * parts), dtype=dtype)
    want, want_total = reference.add_rms_norm(x, residual, weight, EPS, branch)
    got, total = norm_act.add_rms_norm(x, residual, weight, EPS, branch)
    assert few_steps_apart(want_total, total, dtype)
    assert few_steps_apart(want, got, dtype)
    if not weighted:
        assert got is total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [True, False])
def test_branch_before_the_sum_and_rounding_to_codes(randn, device, half, kind, weighted):
    x, residual = randn(3, 200).to(half), (2 * randn(3, 200) + 1).to(half)
    branch = make_branch(kind, randn(200).to(half))
    weight = randn(200).to(half) if weighted else None
    arguments = (x, residual, weight, EPS, ActivationSpec(), None, branch)
    want, want_scales, want_total = reference.add_rms_norm_quantize(*arguments)
    got, scales, total = fused_quant.add_rms_norm_quantize(*arguments)
    assert few_steps_apart(want_total, total, half)
    assert few_steps_apart(want_scales, scales, half)
    # The branch is rounded between its parts: a last bit of bfloat16 is a whole code.
    most, share = (2, 0.2) if half is torch.bfloat16 else (1, 0.1)
    assert (want.int() - got.int()).abs().max() <= most
    assert (want != got).float().mean() < share


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("C", [256, 1280])
def test_branch_before_the_sum_and_limbs(device, half, kind, weighted, C):
    generator = torch.Generator().manual_seed(2)
    x, residual, norm, weight = (
        torch.randn(*shape, generator=generator).to(device, half)
        for shape in ((3, C), (3, C), (C,), (C,))
    )
    branch, form = make_branch(kind, norm), LimbForm(bits=8, with_sums=True)
    weight = weight if weighted else None
    want, want_total = reference.add_rms_norm(x, residual, weight, EPS, branch)
    got, total = fused_limbs.add_rms_norm_limbs(x, residual, weight, EPS, form, branch)
    assert few_steps_apart(want_total, total, half)
    assert few_steps_apart(want, from_limbs(got), half)


def gemma_norm(x, weight_C, eps):
    """Rounded once, after the weight."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_C


def test_a_float32_weight_is_multiplied_before_rounding(half, device):
    """Rounded before it as well, about a third of the results would differ."""
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(16, 512, generator=generator).to(device, half) for _ in range(2))
    weight = (1 + torch.randn(512, generator=generator) / 8).to(device)
    total = x + residual
    want = gemma_norm(total, weight, EPS).to(half)
    twice = (gemma_norm(total, 1, EPS).to(half) * weight).to(half)
    form = LimbForm(bits=8, with_sums=True)
    found = {
        "reference": reference.add_rms_norm(x, residual, weight, EPS)[0],
        "norm": norm_act.add_rms_norm(x, residual, weight, EPS)[0],
        "first norm": norm_act.rms_norm(total, weight, EPS),
        "limbs": from_limbs(fused_limbs.add_rms_norm_limbs(x, residual, weight, EPS, form)[0]),
    }
    for name, got in found.items():
        shares = [float((got.to(half) != each).float().mean()) for each in (want, twice)]
        assert shares[0] < 0.02 and shares[1] > 0.1, (name, shares)
    codes, scales, _ = fused_quant.add_rms_norm_quantize(x, residual, weight, EPS, ActivationSpec())
    wanted = reference.quantize_input(want, ActivationSpec())
    assert (codes != wanted[0]).float().mean() < 0.01
    assert (scales != wanted[1]).float().mean() < 0.2


@pytest.mark.parametrize("width", [24, 1025])
def test_gelu_and_mul(randn, assert_close, tolerance, dtype, poison, width):
    """Gates far below 0 give 0, far above themselves."""
    x = 3 * randn(3, 2 * width)
    x[:, :3] = torch.tensor([-30.0, 30, 0], dtype=dtype)
    want = reference.gelu_and_mul(x)
    got = norm_act.gelu_and_mul(x)
    assert_close("gelu_and_mul", want, got, tolerance(dtype))
    assert (got[:, 0] == 0).all() and torch.equal(got[:, 1], want[:, 1])
    silu = reference.silu_and_mul(x).float()
    assert (silu - want.float()).abs().max() > 0.1


def test_gelu_and_mul_to_codes_and_limbs(half, device):
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(3, 512, generator=generator).to(device, half)
    want, want_scales = reference.gelu_and_mul_quantize(x, ActivationSpec())
    got, scales = fused_quant.gelu_and_mul_quantize(x, ActivationSpec())
    assert (want.int() - got.int()).abs().max() <= 1 and (want != got).float().mean() < 0.02
    assert few_steps_apart(want_scales, scales, half)
    limbs = ops.gelu_and_mul_limbs(x, LimbForm(bits=8, with_sums=True), kernel="triton")
    assert few_steps_apart(reference.gelu_and_mul(x), from_limbs(limbs), half)
