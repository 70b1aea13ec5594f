"""Kernels that add split-K partial sums while loading: same results as with the sum."""

import pytest
import torch

from formats.scheme import ActivationSpec
from qkernels.attention import rope_write_kv as kv_cache
from qkernels.operands.codes import InputRounding
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs
from qkernels.operands.split_k import SplitKPartials, split_heads
from qkernels.rowwise.norm import norm
from qkernels.rowwise.spec import NormSpec
from tests.qkernels.flat_attention import paged_kv

P, B, J, H = 4, 16, 2, 6
ROUNDINGS = [ActivationSpec(), ActivationSpec(type="float")]


@pytest.fixture
def random_parts(device, dtype):
    """[parts, *shape] of very different sizes, so that the order of a sum shows."""

    def make(parts: int, *shape: int) -> SplitKPartials:
        generator = torch.Generator().manual_seed(parts)
        x = torch.randn(parts, *shape, generator=generator)
        x *= 2 ** (8 * torch.rand(parts, *shape, generator=generator) - 4)
        return SplitKPartials(parts=x.to(device), dtype=dtype)

    return make


def same(got, want) -> bool:
    return all(torch.equal(a.float(), b.float()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rows, C", [(1, 64), (3, 1000), (33, 128), (2, 2048)])
@pytest.mark.parametrize("parts", [1, 2, 5, 16])
def test_norm(random_parts, device, dtype, poison, parts, rows, C):
    x = random_parts(parts, rows, C)
    residual, weight = (torch.randn(n, C, device=device).to(dtype) for n in (rows, 1))
    rest = residual, NormSpec(weight_C=weight[0], eps=1e-5)
    normed, total = norm(x, *rest)
    assert total.dtype == dtype
    want, want_total = norm(x.total(), *rest)
    assert torch.equal(total, want_total)
    # rows in more warps: sums of squares in another order, last bits of the result
    off = (normed.float() - want.float()).abs().max()
    assert off <= 8 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("activation", ROUNDINGS, ids=["int8", "float8"])
@pytest.mark.parametrize("rows, C", [(1, 64), (3, 1000), (17, 2048)])
def test_norm_and_rounding(random_parts, half, device, poison, activation, rows, C):
    x = random_parts(3, rows, C)
    x = SplitKPartials(parts=x.parts, dtype=half)
    residual, weight = (torch.randn(n, C, device=device).to(half) for n in (rows, 1))
    rest = residual, NormSpec(weight_C=weight[0], eps=1e-5), InputRounding(activation, None)
    (codes, scales), total = norm(x, *rest)
    (want_codes, want_scales), want_total = norm(x.total(), *rest)
    assert torch.equal(total, want_total)
    assert torch.allclose(scales, want_scales, rtol=4 * torch.finfo(half).eps)
    off = (codes.float() != want_codes.float()).float().mean()
    assert off < 0.05, "a last bit of the norm moves few codes"


@pytest.mark.parametrize("bits, with_sums", [(4, False), (8, True)])
@pytest.mark.parametrize("parts, rows, C", [(1, 1, 128), (8, 3, 1280), (16, 2, 2048)])
def test_norm_and_limbs(random_parts, half, device, poison, bits, with_sums, parts, rows, C):
    x = random_parts(parts, rows, C)
    x = SplitKPartials(parts=x.parts, dtype=half)
    residual, weight = (torch.randn(n, C, device=device).to(half) for n in (rows, 1))
    form = LimbForm(bits=bits, with_sums=with_sums)
    rest = residual, NormSpec(weight_C=weight[0], eps=1e-5), form
    limbs, total = norm(x, *rest)
    want, want_total = norm(x.total(), *rest)
    assert torch.equal(total, want_total)
    got, want = from_limbs(limbs).float(), from_limbs(want).float()
    assert (got - want).abs().max() <= 8 * torch.finfo(half).eps * want.abs().max()
    assert (got != want).float().mean() < 0.05, "a last bit of a norm now and then"


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("normed", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("D, width, tokens", [(16, 16, 5), (24, 12, 3), (128, 128, 34)])
def test_rope_and_write(random_parts, device, dtype, poison, D, width, tokens, normed, codes):
    """34 tokens: two heads for each program."""
    qkv = random_parts(3, tokens, (H + 2 * J) * D)
    angle = torch.rand(40, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(device)
    positions = (torch.arange(tokens, device=device) * 7) % 40
    slots = (torch.arange(tokens, device=device) * 5) % (P * B)
    slots[1] = -1
    norms = {}
    if normed:
        norm = torch.randn(2, D, device=device).to(dtype)
        norms = {"q_norm_D": norm[0], "k_norm_D": norm[1], "eps": 1e-5}

    def run(heads):
        pages = [torch.ones(P, B, J, D, device=device).to(codes or dtype) for _ in range(2)]
        scales = [] if codes is None else [torch.ones(P, B, J, device=device) for _ in range(2)]
        q = kv_cache.rope_write_kv_(
            *heads, cos_sin, positions, paged_kv(*pages, *scales), slots, **norms
        )
        return q, *pages, *scales

    got, want = run(split_heads(qkv, (H, J, J), D)), run(split_heads(qkv.total(), (H, J, J), D))
    assert got[0].dtype == dtype
    assert same([got[2], *got[4:]], [want[2], *want[4:]]), "values are as they are"
    # a compiler may fuse another product of the two with their sum; squares are summed as they lie
    bound = 0.02 if normed else 4 * torch.finfo(dtype).eps
    for a, b in zip(got[:1] if codes else got[:2], want, strict=False):
        assert (a.float() - b.float()).abs().max() <= bound * b.float().abs().max()
    if codes:
        assert (got[1].float() != want[1].float()).float().mean() < 0.05
