"""Keys and values into pages, 16-bit and 8-bit, with and without rotation, against torch twins."""

import pytest
import torch

from qkernels import reference
from qkernels.attention import reference as attention_reference
from qkernels.attention import rope_write_kv as kv_cache
from tests.qkernels.flat_attention import paged_kv

P, B, J, H = 4, 16, 2, 6
CODES = [torch.int8, torch.float8_e4m3fn]
CODED = pytest.mark.parametrize("codes", CODES, ids=["int8", "float8"])
SLOTS = [17, -1, 46, 0, 63]


@pytest.fixture
def randn(device, dtype):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.fixture
def make_pages(device, dtype):
    """() -> (k_pages, v_pages), and their scales where 8-bit; each a slice of a larger tensor."""

    def make(D, codes=None, static=None):
        pages = torch.ones(P, 2, B, J, D, device=device).to(codes or dtype)
        if codes is None:
            return (*pages.unbind(1),)
        if static is not None:
            scales = torch.tensor(static, device=device)
            return (*pages.unbind(1), *(s.expand(P, B, J) for s in scales))
        scales = torch.full((P, 2, J, B), 7.0, device=device)
        return (*pages.unbind(1), *(s.transpose(1, 2) for s in scales.unbind(1)))

    return make


def slots_on(device, dtype=torch.int64):
    return torch.tensor(SLOTS, dtype=dtype, device=device)


def write(module, kv, pages, slots, **settings):
    k, v = kv[:, :J], kv[:, J:]
    module.write_kv_(k, v, paged_kv(*pages, **settings), slots)


def same(got, want):
    """Equal numbers: a zero may have another sign."""
    return all(torch.equal(a.float(), b.float()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("D", [16, 24, 128, 256])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_kv(randn, make_pages, device, slot_dtype, D):
    """Padding writes nothing, not even the last slot, which index -1 would be."""
    kv, slots = randn(5, 2 * J, D), slots_on(device, slot_dtype)
    got, want = make_pages(D), make_pages(D)
    write(reference, kv, want, slots)
    write(kv_cache, kv, got, slots)
    assert same(got, want)
    assert torch.equal(got[0][2, 14], kv[2, :J]) and (got[1][3, 14] == 1).all()


@CODED
@pytest.mark.parametrize("D", [16, 24, 128])
def test_write_kv_in_8_bits(randn, make_pages, device, codes, D):
    """Codes and scales bit for bit as torch rounds them; rows of very different size, and zero."""
    kv = randn(5, 2 * J, D) * torch.tensor([1.0, 1, 1e-3, 50, 0], device=device)[:, None, None]
    kv, slots = kv.to(randn(1).dtype), slots_on(device)
    got = make_pages(D, codes)
    host = [t.cpu() for t in make_pages(D, codes)]
    write(reference, kv.cpu(), host, slots.cpu())
    write(kv_cache, kv, got, slots)
    assert same([t.cpu() for t in got], host)
    k_pages, _, k_scales, _ = got
    assert (k_scales[3, 14] == 7).all(), "an unwritten slot keeps its scale"
    restored = k_pages[2, 14].float() * k_scales[2, 14][:, None]
    step = kv[2, :J].abs().amax(-1, keepdim=True).float() / (127 if codes is torch.int8 else 14)
    assert ((restored - kv[2, :J].float()).abs() <= 0.51 * step).all()


@CODED
def test_static_scales_are_used_and_unchanged(randn, make_pages, device, codes):
    """One scale for all slots: a view with strides of 0. What is beyond the codes is clamped."""
    kv, slots = randn(5, 2 * J, 32) * 4, slots_on(device)
    got = make_pages(32, codes, static=[0.03125, 0.001])
    host = [t.cpu() for t in make_pages(32, codes, static=[0.03125, 0.001])]
    write(reference, kv.cpu(), host, slots.cpu(), static_scales=True)
    write(kv_cache, kv, got, slots, static_scales=True)
    assert same([t.cpu() for t in got], host)
    assert got[1].float().abs().max() == (128 if codes is torch.int8 else 448)


@pytest.mark.parametrize("codes", [None, *CODES], ids=["16 bits", "int8", "float8"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, width", [(32, 32), (80, 80), (64, 16), (32, 0)])
def test_rope_and_write(
    randn,
    make_pages,
    assert_close,
    tolerance,
    device,
    dtype,
    poison,
    D,
    width,
    interleaved,
    normed,
    codes,
):
    qkv, slots = randn(5, H + 2 * J, D), slots_on(device)
    q, k, v = qkv.split([H, J, J], dim=1)
    angle = torch.rand(40, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(device)
    positions = torch.tensor([0, 39, 7, 7, 12], device=device)
    norms = {"interleaved": interleaved}
    if normed:
        norms["query_scales"] = torch.linspace(0.5, 2, 40).to(device)
        norms |= {"q_norm_D": randn(D) + 1, "k_norm_D": randn(D) + 1, "eps": 1e-5}
    # on the CPU, whose division is exact; a GPU's by a constant is not
    got, want = make_pages(D, codes), [t.cpu() for t in make_pages(D, codes)]
    inputs = (q, k, v, cos_sin, positions)
    q_got = kv_cache.rope_write_kv_(*inputs, paged_kv(*got), slots, **norms, inputs_ready=normed)
    norms = {n: x.cpu() if torch.is_tensor(x) else x for n, x in norms.items()}
    inputs = [x.cpu() for x in inputs]
    q_want = attention_reference.rope_write_kv_(*inputs, paged_kv(*want), slots.cpu(), **norms)
    got = [t.cpu() for t in got]
    assert_close("q", q_want, q_got, tolerance(dtype))
    if codes is None:
        assert_close("k", want[0], got[0], tolerance(dtype))
        assert same(got[1:], want[1:])
        return
    # keys that differ in a last bit before they are rounded may differ by a step after
    dequantized = [
        [t.float() * s[..., None] for t, s in zip(pages[:2], pages[2:], strict=True)]
        for pages in (want, got)
    ]
    assert_close("k", dequantized[0][0], dequantized[1][0], 5e-3 + tolerance(dtype))
    assert same([got[1], got[3]], [want[1], want[3]]), "values are not rotated"
    assert_close("k scales", want[2], got[2], tolerance(dtype))


def test_write_of_no_tokens(randn, make_pages, device):
    qkv, pages = randn(0, H + 2 * J, 32), make_pages(32)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    q = kv_cache.rope_write_kv_(
        *qkv.split([H, J, J], dim=1),
        torch.zeros(4, 32, device=device),
        empty,
        paged_kv(*pages),
        empty,
    )
    assert q.shape == (0, H, 32) and (pages[0] == 1).all()
