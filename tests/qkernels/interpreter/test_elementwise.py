"""Norm, activation, rope and KV-write kernels against their torch twins."""

import pytest
import torch

from formats.scheme import ActivationSpec
from qkernels.attention import reference as attention_reference
from qkernels.attention import rope
from qkernels.rowwise import embed_norms, norm_act
from qkernels.rowwise import norm_act_quantize as fused_quant
from qkernels.rowwise import reference as rowwise_reference


@pytest.fixture
def randn(device, dtype):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("M, C", [(1, 64), (5, 1000)])
def test_embeddings_beside_states(randn, assert_close, tolerance, dtype, poison, M, C):
    table, state = randn(7, C), randn(M, C)
    norms = randn(2, C)
    tokens = torch.tensor([6, 0, 3, 3, 1], device=state.device)[:M]
    inputs = tokens, table, norms[0], state, norms[1], 1e-5
    want, want_normed = rowwise_reference.embed_norms(*inputs)
    got, normed = embed_norms.embed_norms(*inputs)
    assert_close("both", want, got, tolerance(dtype))
    assert_close("states", want_normed, normed, tolerance(dtype))


@pytest.mark.parametrize("shape", [(1, 64), (3, 1000), (2, 5, 48)])
def test_rms_norm(randn, assert_close, tolerance, dtype, poison, shape):
    x, weight = randn(*shape), randn(shape[-1])
    want = rowwise_reference.rms_norm(x, weight, 1e-5)
    assert_close("rms_norm", want, norm_act.rms_norm(x, weight, 1e-5), tolerance(dtype))
    got, total = norm_act.add_rms_norm(x, 3 * x + 1, weight, 1e-5)
    want, want_total = rowwise_reference.add_rms_norm(x, 3 * x + 1, weight, 1e-5)
    assert_close("add_rms_norm", want, got, tolerance(dtype))
    assert torch.equal(total, want_total)


def test_the_norm_sees_the_sum_as_it_is_stored(half, device):
    """Rounded to the model's dtype: normed unrounded, every fourth element would differ."""
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(16, 512, generator=generator).to(device, half) for _ in range(2))
    weight = torch.ones(512, device=device, dtype=half)
    got, total = norm_act.add_rms_norm(x, residual, weight, 1e-5)
    stored, unrounded = (x + residual).float(), x.float() + residual.float()
    assert torch.equal(total.float(), stored)
    shares = []
    for seen in (stored, unrounded):
        want = (seen * torch.rsqrt(seen.square().mean(-1, keepdim=True) + 1e-5)).to(half)
        shares.append(float((got != want).float().mean()))
    # the inverse root's last bit moves few elements over a rounding boundary
    assert shares[0] < 0.02 and shares[1] > 0.1, shares


def test_the_quantized_norm_sees_the_sum_as_it_is_stored(half, device):
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(64, 512, generator=generator).to(device, half) for _ in range(2))
    weight = torch.ones(512, device=device, dtype=half)
    got = fused_quant.add_rms_norm_quantize(x, residual, weight, 1e-5, ActivationSpec())
    assert torch.equal(got[2], x + residual)
    unrounded = x.float() + residual.float()
    shares = []
    for seen in (got[2].float(), unrounded):
        normed = seen * torch.rsqrt(seen.square().mean(-1, keepdim=True) + 1e-5)
        scales = rowwise_reference.quantize_input(normed.to(half), ActivationSpec())[1]
        shares.append(float((got[1] != scales).float().mean()))
    # a scale is the row's largest value, rounded; the inverse root's last bit moves few of them
    assert shares[0] < 0.1 and shares[1] > 0.2, shares


def test_rms_norm_of_a_slice(randn, assert_close, tolerance, dtype):
    """Query heads inside a fused projection."""
    qkv, weight = randn(3, 6, 32), randn(32)
    want = rowwise_reference.rms_norm(qkv[:, :4], weight, 1e-6)
    assert_close("slice", want, norm_act.rms_norm(qkv[:, :4], weight, 1e-6), tolerance(dtype))


@pytest.mark.parametrize("width", [24, 1025])
def test_silu_and_mul(randn, assert_close, tolerance, dtype, poison, width):
    x = randn(3, 2 * width)
    want = rowwise_reference.silu_and_mul(x)
    assert_close("silu_and_mul", want, norm_act.silu_and_mul(x), tolerance(dtype))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, width", [(32, 32), (80, 80), (64, 16), (32, 0)])
def test_rope(randn, assert_close, tolerance, device, dtype, poison, D, width, interleaved):
    qkv = randn(5, 8, D)
    angle = torch.rand(40, width // 2) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(device)
    positions = torch.tensor([0, 39, 7, 7, 12], device=device)
    inputs = (qkv[:, :4], qkv[:, 4:6], cos_sin, positions, interleaved)
    want = attention_reference.apply_rope(*inputs)
    got = rope.apply_rope(*inputs)
    for name, a, b in zip("qk", want, got, strict=True):
        assert_close(name, a, b, tolerance(dtype))
