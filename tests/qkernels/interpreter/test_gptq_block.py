"""GPTQ's inner loop as a kernel against its loop in torch (calibrate/)."""

import pytest
import torch

from calibrate.solvers import gptq, refine, triton_block
from formats.gguf.schemes import BLOCK_SCHEMES
from formats.scheme import QuantSpec, Scheme


def problem(columns, outputs, spec, per_column, seed=0):
    """Arguments of round_block, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3 * columns, columns, generator=generator)
    hessian = inputs.t() @ inputs / len(inputs) + 0.1 * torch.eye(columns)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    block = torch.randn(columns, outputs, generator=generator)
    rows = columns if per_column else 1
    scale = 0.1 + 0.2 * torch.rand(rows, outputs, generator=generator)
    scale *= torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
    zero = torch.full_like(scale, spec.symmetric_zero)
    if not spec.symmetric:
        zero = torch.randint(0, spec.max_code + 1, scale.shape, generator=generator).float()
    return block, scale.expand(columns, outputs), zero.expand(columns, outputs), upper


@pytest.mark.parametrize("per_column", [True, False])
@pytest.mark.parametrize("bits, symmetric", [(4, True), (3, False), (8, True)])
@pytest.mark.parametrize("columns, outputs", [(128, 70), (37, 33), (1, 5)])
def test_gptq_codes_and_errors_equal_loop(device, columns, outputs, bits, symmetric, per_column):
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=32)
    block, *others = problem(columns, outputs, spec, per_column)
    block[0, 0] = 1e6  # far beyond the last code
    want_codes, want_errors = gptq.round_block(block.clone(), *others, spec)
    given = [x.to(device) for x in (block, *others)]
    codes, errors = triton_block.round_block(*given, spec)
    # what lies between two codes may take either, and then the columns after it in its row differ
    same = (codes.cpu() == want_codes).all(0)
    assert same.float().mean() >= 0.9
    check_errors(errors, want_errors, same)


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_gptq_k_quant_codes_equal_loop(device, name):
    """Zeros are minima there, and a group may have no step."""
    spec = BLOCK_SCHEMES[name].weight
    block, scale, zero, upper = problem(37, 33, spec, per_column=True)
    zero = torch.rand_like(scale) if name == "q4_k" else 32 * scale
    scale = scale.clone()
    scale[:, 5] = 0
    want_codes, want_errors = gptq.round_block(block.clone(), scale, zero, upper, spec)
    given = [x.to(device) for x in (block, scale, zero, upper)]
    codes, errors = triton_block.round_block(*given, spec)
    same = (codes.cpu() == want_codes).all(0)
    assert same.float().mean() >= 0.9 and same[5] and not want_codes[:, 5].any()
    check_errors(errors, want_errors, same)


def test_gptq_fp4_codes_equal_loop(device):
    """Ties go to even codes; what is far beyond the largest number is clipped."""
    spec = Scheme.parse("w4a16-mxfp4").weight
    block, scale, zero, upper = problem(37, 33, spec, per_column=True)
    scale = torch.full_like(scale, 0.25)
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -5.0, 1e6])
    block[0, : len(halves)] = halves / 4
    want_codes, want_errors = gptq.round_block(block.clone(), scale, zero * 0, upper, spec)
    assert want_codes[0, : len(halves)].tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 0, 14, 7]
    given = [x.to(device) for x in (block, scale, zero * 0, upper)]
    codes, errors = triton_block.round_block(*given, spec)
    same = (codes.cpu() == want_codes).all(0)
    assert same.float().mean() >= 0.9
    assert torch.equal(codes.cpu()[0], want_codes[0])
    check_errors(errors, want_errors, same)


@pytest.mark.parametrize("columns, outputs", [(128, 70), (37, 33), (1, 5)])
@pytest.mark.parametrize("bits, symmetric", [(4, True), (3, False)])
def test_coordinate_descent_equals_loop(device, columns, outputs, bits, symmetric):
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=32)
    own, scale, zero, upper = problem(columns, outputs, spec, per_column=True)
    hessian = upper.t() @ upper
    slope = hessian @ torch.randn(columns, outputs, generator=torch.Generator().manual_seed(1))
    want_codes, want_moved = refine.descend_block(slope, own, scale, zero, hessian, spec)
    given = [x.to(device) for x in (slope, own, scale, zero, hessian)]
    codes, moved = triton_block.descend_block(*given, spec)
    same = (codes.cpu() == want_codes).all(0)
    assert same.float().mean() >= 0.9
    assert torch.allclose(moved.cpu()[:, same], want_moved[:, same], atol=1e-4)


def check_errors(errors, want_errors, same):
    # an error far beyond the codes is added to all later columns, in another order
    off = (errors.cpu() - want_errors).abs()[:, same]
    assert (off <= 1e-4 * (1 + want_errors.abs().amax(0)[same])).all()
