"""Norm, activation, rope and KV-write kernels against their torch twins."""

import pytest
import torch

from formats.scheme import ActivationSpec
from qkernels.attention import reference as attention_reference
from qkernels.attention import rope
from qkernels.operands.codes import InputRounding
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs
from qkernels.rowwise import activate, embed_norms, norm
from qkernels.rowwise import reference as rowwise_reference
from qkernels.rowwise.spec import PLAIN, ActSpec, Branch, NormSpec


@pytest.fixture
def randn(device, dtype):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("M, C", [(1, 64), (5, 1000)])
def test_embedding_rows_with_media_states(randn, assert_close, tolerance, dtype, poison, M, C):
    table, state = randn(7, C), randn(M, C)
    norms = randn(2, C)
    tokens = torch.tensor([6, 0, 3, 3, 1], device=state.device)[:M]
    inputs = tokens, table, norms[0], state, norms[1], 1e-5
    want, want_normed = rowwise_reference.embed_norms(*inputs)
    got, normed = embed_norms.embed_norms(*inputs)
    assert_close("both", want, got, tolerance(dtype))
    assert_close("states", want_normed, normed, tolerance(dtype))


@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
@pytest.mark.parametrize("shape", [(1, 64), (3, 1000), (2, 5, 48)])
def test_norm(randn, assert_close, tolerance, dtype, poison, shape, kind):
    x, weight, bias = randn(*shape) + 1, randn(shape[-1]), 2 * randn(shape[-1])
    spec = NormSpec(
        kind=kind[:5].strip(), weight_C=weight, bias_C=bias if "bias" in kind else None, eps=1e-5
    )
    want, _ = rowwise_reference.norm(x, None, spec)
    got, total = norm.norm(x, None, spec)
    assert total is x
    assert_close(kind, want, got, tolerance(dtype))
    got, total = norm.norm(x, 3 * x + 1, spec)
    want, want_total = rowwise_reference.norm(x, 3 * x + 1, spec)
    assert_close(f"{kind} of a sum", want, got, tolerance(dtype))
    assert torch.equal(total, want_total)


def test_layer_norm_equals_torch(randn, assert_close, tolerance, dtype, poison):
    """1000 channels of a block of 1024: those outside of the row are not in its variance."""
    x, weight, bias = 3 * randn(3, 1000) + 5, randn(1000), randn(1000)
    want = torch.nn.functional.layer_norm(x.double(), (1000,), weight.double(), bias.double(), 1e-5)
    got, _ = norm.norm(x, None, NormSpec(kind="layer", weight_C=weight, bias_C=bias, eps=1e-5))
    assert_close("layer norm", want, got, tolerance(dtype))


def test_norm_reads_rounded_residual_sum(half, device):
    """Rounded to the model's dtype: normed unrounded, every fourth element would differ."""
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(16, 512, generator=generator).to(device, half) for _ in range(2))
    weight = torch.ones(512, device=device, dtype=half)
    got, total = norm.norm(x, residual, NormSpec(weight_C=weight, eps=1e-5))
    stored, unrounded = (x + residual).float(), x.float() + residual.float()
    assert torch.equal(total.float(), stored)
    shares = []
    for seen in (stored, unrounded):
        want = (seen * torch.rsqrt(seen.square().mean(-1, keepdim=True) + 1e-5)).to(half)
        shares.append(float((got != want).float().mean()))
    # the inverse root's last bit moves few elements over a rounding boundary
    assert shares[0] < 0.02 and shares[1] > 0.1, shares


def test_quantized_norm_reads_rounded_residual_sum(half, device):
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(64, 512, generator=generator).to(device, half) for _ in range(2))
    spec = NormSpec(weight_C=torch.ones(512, device=device, dtype=half), eps=1e-5)
    got, total = norm.norm(x, residual, spec, InputRounding(ActivationSpec(), None))
    assert torch.equal(total, x + residual)
    unrounded = x.float() + residual.float()
    shares = []
    for seen in (total.float(), unrounded):
        normed = seen * torch.rsqrt(seen.square().mean(-1, keepdim=True) + 1e-5)
        scales = rowwise_reference.quantize_input(normed.to(half), ActivationSpec())[1]
        shares.append(float((got.scales_M1 != scales).float().mean()))
    # a scale is the row's largest value, rounded; the inverse root's last bit moves few of them
    assert shares[0] < 0.1 and shares[1] > 0.2, shares


@pytest.mark.parametrize("form", ["tensor", "codes", "limbs"])
@pytest.mark.parametrize("has_branch", [False, True], ids=["", "branch"])
def test_addend_is_rounded_into_x_first(device, half, poison, form, has_branch):
    """As if x were the sum of two ranks in the model's dtype."""
    generator = torch.Generator().manual_seed(2)
    x, addend, residual = torch.randn(3, 4, 1024, generator=generator).to(device, half)
    weight, end = torch.rand(2, 1024, generator=generator).to(device, half) + 0.5
    spec = NormSpec(weight_C=weight, eps=1e-5)
    branch = Branch(norm=NormSpec(weight_C=end, eps=1e-5), factor=0.5) if has_branch else PLAIN
    out = {"tensor": None, "codes": InputRounding(ActivationSpec(), None)}.get(
        form, LimbForm(bits=4)
    )
    got, total = norm.norm(x, residual, spec, out, branch, addend)
    want, want_total = norm.norm(x + addend, residual, spec, out, branch)
    assert torch.equal(total, want_total)
    if form == "limbs":
        assert torch.equal(from_limbs(got), from_limbs(want))
    else:
        pairs = [(got, want)] if form == "tensor" else zip(got, want, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    plain = rowwise_reference.norm(x, residual, spec, None, branch, addend)
    assert torch.equal(
        plain[1], rowwise_reference.norm(x + addend, residual, spec, None, branch)[1]
    )


def test_norm_of_a_slice(randn, assert_close, tolerance, dtype):
    """Query heads inside a fused projection."""
    qkv, spec = randn(3, 6, 32), NormSpec(weight_C=randn(32), eps=1e-6)
    want, _ = rowwise_reference.norm(qkv[:, :4], None, spec)
    got, _ = norm.norm(qkv[:, :4], None, spec)
    assert_close("slice", want, got, tolerance(dtype))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "alone"])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
@pytest.mark.parametrize("width", [24, 1025])
def test_activations(randn, assert_close, tolerance, dtype, poison, width, kind, gated):
    """Far below 0 they give 0, far above themselves (or their squares)."""
    spec = ActSpec(kind=kind, gated=gated)
    x = 3 * randn(3, width * (1 + gated))
    x[:, :3] = torch.tensor([-30.0, 30, 0], dtype=dtype)
    want, got = rowwise_reference.activate(x, spec), activate.activate(x, spec)
    assert_close(kind, want, got, tolerance(dtype))
    if kind != "silu":
        assert (got[:, 0] == 0).all() and torch.equal(got[:, 1], want[:, 1])
    others = {"silu": "gelu", "gelu_tanh": "silu", "gelu": "relu", "relu": "relu2", "relu2": "relu"}
    other = rowwise_reference.activate(x, ActSpec(kind=others[kind], gated=gated))
    assert (other.float() - want.float()).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["relu", "relu2", "silu"])
def test_activation_propagates_nan(device, kind):
    x = torch.tensor([[1.0, float("nan"), -2.0, float("inf")]], device=device)
    found = activate.activate(x, ActSpec(kind=kind, gated=False))
    assert found.isnan().tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "alone"])
def test_result_of_an_activation_is_clamped(randn, assert_close, tolerance, dtype, poison, gated):
    """Step-3.5's: silu(gate) above a limit, up on both sides. NaN stays."""
    x = 3 * randn(3, 35 * (1 + gated))
    x[:, :3] = torch.tensor([-30.0, 30, 0], dtype=dtype)
    spec = ActSpec(kind="silu", gated=gated, limit=0.7)
    want, got = rowwise_reference.activate(x, spec), activate.activate(x, spec)
    assert_close("cut", want, got, tolerance(dtype))
    assert got.abs().max() <= (0.49 if gated else 0.7) * 1.01
    plain = rowwise_reference.activate(x, ActSpec(kind="silu", gated=gated))
    assert (plain.float() - want.float()).abs().max() > 0.1
    x[1, -1] = torch.nan
    for module in (activate, rowwise_reference):
        assert module.activate(x, spec).isnan().sum() == 1


@pytest.mark.parametrize("limit", [0.7, None])
def test_swiglu_of_gpt_oss(randn, assert_close, tolerance, dtype, poison, limit):
    """The gate is cut above a limit, up on both sides, then 1 is added to it. NaN stays."""
    x = 3 * randn(3, 70)
    x[:, :3] = torch.tensor([-30.0, 30, 0], dtype=dtype)
    spec = ActSpec(kind="swiglu_oai", alpha=1.702, limit=limit)
    gate, up = x.double().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    want = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    for module in (activate, rowwise_reference):
        assert_close(module.__name__, want, module.activate(x, spec), tolerance(dtype))
    x[1, -1] = torch.nan
    for module in (activate, rowwise_reference):
        assert module.activate(x, spec).isnan().sum() == 1


@pytest.mark.parametrize(
    ("kind", "gated"),
    [
        *(
            (kind, gated)
            for kind in ("gelu_tanh", "gelu", "relu", "silu_cut")
            for gated in (True, False)
        ),
        ("swiglu_oai", True),  # it always has a gate
    ],
)
def test_activations_to_codes_and_limbs(half, device, kind, gated):
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(3, 512, generator=generator).to(device, half)
    spec, rounding = ActSpec(kind=kind, gated=gated), InputRounding(ActivationSpec(), None)
    if kind == "silu_cut":
        spec = ActSpec(kind="silu", gated=gated, limit=0.7)
    if kind == "swiglu_oai":
        spec = ActSpec(kind=kind, limit=1.7, alpha=1.702)
    want, want_scales = rowwise_reference.activate(x, spec, rounding)
    got, scales = activate.activate(x, spec, rounding)
    assert (want.int() - got.int()).abs().max() <= 1 and (want != got).float().mean() < 0.02
    torch.testing.assert_close(scales, want_scales, rtol=4 * torch.finfo(half).eps, atol=0)
    limbs = activate.activate(x, spec, LimbForm(bits=8, with_sums=True))
    want = rowwise_reference.activate(x, spec).double()
    bound = (torch.finfo(half).eps + 1e-6) * (2 * want.abs() + 1)
    assert ((want - from_limbs(limbs).double()).abs() <= bound).all()


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
