"""Keys and values into 4-bit pages, with and without rotary embedding."""

import pytest
import torch

from qkernels.attention import reference
from qkernels.attention import rope_write_kv as kv_write
from qkernels.attention.cache import INT4_PAGES, PagedKv
from tests.qkernels.int4_case import hadamard, numbers_of

P, B, J, H = 4, 16, 2, 6
SLOTS = [17, -1, 46, 0, 63]


def pages(D, device):
    """Pages whose every byte and number is something that no write leaves."""
    cache = PagedKv.zeros((P, B, J, D), INT4_PAGES, device)
    for pages in (cache.k_pages, cache.v_pages):
        pages.fill_(0x5A)
    for pairs in (cache.k_scales, cache.v_scales):
        pairs.fill_(7)
    return cache


def rows_of(*shape, dtype, device):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_written_row_error_is_at_most_half_a_step(dtype, device, D):
    """Keys after their rotation, values as they are; rows of very different size, and zero."""
    sizes = torch.tensor([1.0, 1, 1e-3, 50, 0], device=device)[:, None, None]
    kv = (rows_of(5, 2 * J, D, dtype=dtype, device=device) * sizes).to(dtype)
    kv[2] += 3  # a zero that is far from 0
    k, v = kv[:, :J], kv[:, J:]
    slots = torch.tensor(SLOTS, device=device)
    got, want = pages(D, device), pages(D, torch.device("cpu"))
    kv_write.write_kv_(k, v, got, slots)
    reference.write_kv_(k.cpu(), v.cpu(), want, slots.cpu())
    for name in ("v_pages", "v_scales", "k_scales"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), f"{name}: as torch's"
    # a GPU may fuse the end of the rotation with what follows: a last bit before it is rounded
    differs = (got.k_pages.cpu() != want.k_pages).float().mean()
    assert differs <= (1e-3 if device.type == "cuda" else 0), differs
    rotated = k.double().cpu() @ hadamard(D)
    for x, stored, pairs, groups in (
        (rotated, got.k_pages, got.k_scales, 2),
        (v.double().cpu(), got.v_pages, got.v_scales, 1),
    ):
        for token, slot in enumerate(SLOTS):
            if slot < 0:
                continue
            at = slot // B, slot % B
            found = numbers_of(stored[at], pairs[at]).unflatten(-1, (groups, -1))
            exact = x[token].unflatten(-1, (groups, -1))
            step = (exact.amax(-1) - exact.amin(-1)) / 15
            # float16 has 11 bits of the scale and of the zero, which is as far as 8 steps from 0
            allowed = 0.5 * step + 2**-11 * (exact.abs().amax(-1) + 16 * step) + 2**-23
            assert ((found - exact).abs().amax(-1) <= allowed).all(), (token, slot)
    assert (got.k_pages[2, 13] == 0x5A).all() and (got.v_scales[3, 14] == 7).all()


def test_row_layout_bytes(device):
    """The documented bytes: channels 0 .. 15 are low nibbles, 16 .. 31 high ones."""
    cache = pages(32, device)
    row = torch.cat([torch.arange(16), torch.zeros(16)]).to(device, torch.float32)
    row[16:] = 8.0
    slots = torch.tensor([5], device=device)
    kv_write.write_kv_(row.expand(1, J, 32).contiguous(), row.expand(1, J, 32), cache, slots)
    assert cache.v_pages[0, 5, 1].tolist() == [0x80 + low for low in range(16)]
    assert cache.v_scales[0, 5, 1].tolist() == [1.0, 8.0]


def test_nonfinite_row_stays_nonfinite(device):
    kv = torch.zeros(3, J, 32, device=device)
    kv[0, 0, 3], kv[1, 1, 20] = float("nan"), float("inf")
    cache, slots = pages(32, device), torch.tensor([0, 1, 2], device=device)
    kv_write.write_kv_(kv, kv, cache, slots)
    for stored, pairs in ((cache.k_pages, cache.k_scales), (cache.v_pages, cache.v_scales)):
        found = numbers_of(stored[0, :3], pairs[0, :3]).isnan()
        assert found[0, 0].all() and found[1, 1].all()
        assert not (found[0, 1].any() or found[1, 0].any() or found[2].any())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, width", [(32, 32), (64, 16), (128, 128)])
def test_rope_and_write(assert_close, tolerance, dtype, device, D, width, interleaved, normed):
    """Returned queries are rotated as keys are: their products are those of the originals."""
    qkv = rows_of(5, H + 2 * J, D, dtype=dtype, device=device)
    q, k, v = qkv.split([H, J, J], dim=1)
    angle = torch.rand(40, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(device)
    positions = torch.tensor([0, 39, 7, 7, 12], device=device)
    options = {"interleaved": interleaved}
    if normed:
        options["query_scales"] = torch.linspace(0.5, 2, 40).to(device)
        options["q_norm_D"], options["k_norm_D"] = (
            rows_of(D, dtype=dtype, device=device) + 1 for _ in range(2)
        )
        options["eps"] = 1e-5
    slots = torch.tensor(SLOTS, device=device)
    coded, plain = (
        pages(D, device),
        [torch.zeros(P, B, J, D, device=device).to(dtype) for _ in "kv"],
    )
    got = kv_write.rope_write_kv_(q, k, v, cos_sin, positions, coded, slots, **options)
    plain = PagedKv(k_pages=plain[0], v_pages=plain[1])
    want = kv_write.rope_write_kv_(q, k, v, cos_sin, positions, plain, slots, **options)
    assert_close("q", want.double().cpu() @ hadamard(D), got, 2 * tolerance(dtype))
    for slot in SLOTS:
        if slot < 0:
            continue
        at = slot // B, slot % B
        exact = plain.k_pages[at].double().cpu() @ hadamard(D)
        found = numbers_of(coded.k_pages[at], coded.k_scales[at])
        assert (found - exact).norm() < 0.12 * exact.norm(), "a step is a seventh of a deviation"
        exact = plain.v_pages[at].double().cpu()
        found = numbers_of(coded.v_pages[at], coded.v_scales[at])
        assert (found - exact).norm() < 0.12 * exact.norm(), "values are not rotated"
