"""Attention over 4-bit pages against float64 over the numbers that their bits represent."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.attention import reference, triton_paged
from qkernels.attention.cache import INT4_PAGES, AttentionStep, PagedKv
from qkernels.attention.config import default_attention_config
from qkernels.gpu.device import sm_count
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs
from tests.qkernels.flat_attention import exact_attention
from tests.qkernels.int4_case import numbers_of

exhaustive = pytest.mark.exhaustive


def filled(lengths, J, D, B, spread, generator):
    """Pages and block tables; what belongs to no request has NaN as zero, and any bytes."""
    X = max(1, -(-max(lengths) // B))
    P = len(lengths) * X + 2
    cache = PagedKv.zeros((P, B, J, D), INT4_PAGES, torch.device("cpu"))
    tables = torch.randperm(P, generator=generator)[: P - 2].view(len(lengths), X).int()
    for pages, pairs in ((cache.k_pages, cache.k_scales), (cache.v_pages, cache.v_scales)):
        pages.copy_(torch.randint(0, 256, pages.shape, generator=generator))
        scales = spread ** torch.rand(pairs[..., ::2].shape, generator=generator) / 5
        # neighbours have very different zeros: one of a wrong slot, head or half shows
        zeros = scales * 8 * torch.randn(scales.shape, generator=generator)
        pairs.copy_(torch.stack([scales, zeros], -1).flatten(-2))
    used = torch.zeros(P, B, dtype=torch.bool)
    for r, length in enumerate(lengths):
        slots = torch.arange(length)
        used[tables[r, slots // B].long(), slots % B] = True
        tables[r, -(-length // B) :] = -7  # entries beyond the context are stale
    for pairs in (cache.k_scales, cache.v_scales):
        pairs[~used] = float("nan")
    return cache, tables


@pytest.fixture
def check(assert_close, tolerance, device, poison):
    def run(
        counts,
        lengths,
        H,
        J,
        D,
        B,
        dtype,
        window=None,
        split=None,
        soft_cap=None,
        sinks=None,
        slopes=None,
        chunk_size=None,
        spread=4,
        limbs=None,
    ):
        generator = torch.Generator().manual_seed(D + B + len(counts))
        cache, tables = filled(lengths, J, D, B, spread, generator)
        qkv = torch.randn(sum(counts), H + 2, D, generator=generator).to(dtype)
        q = qkv[:, :H]  # strided, as a slice of a fused projection is
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        settings = {"scale": D**-0.5 / 2, "window": window, "soft_cap": soft_cap}
        step = AttentionStep(
            block_tables_RX=tables.to(device),
            query_starts_R1=starts.to(device),
            context_lengths_R=torch.tensor(lengths, dtype=torch.int32, device=device),
            max_query_len=max(counts),
            max_context_len=max(lengths),
        )
        want = []
        keys, values = (
            numbers_of(*both)
            for both in ((cache.k_pages, cache.k_scales), (cache.v_pages, cache.v_scales))
        )
        for r, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            slots = torch.arange(length)
            index = tables[r, slots // B].long(), slots % B
            rows = q[starts[r] : starts[r + 1]]
            options = settings["scale"], window, soft_cap, sinks, slopes, chunk_size
            want.append(exact_attention(rows, keys[index], values[index], count, length, *options))
        on_device = PagedKv(
            **{
                name: getattr(cache, name).to(device)
                for name in ("k_pages", "v_pages", "k_scales", "v_scales")
            }
        )
        options = {"sinks_H": sinks, "slopes_H": slopes}
        options = {n: None if x is None else x.to(device) for n, x in options.items()}
        options |= settings | {"chunk_size": chunk_size}
        plain = reference.paged_attention(q.to(device), on_device, step, **options)
        assert_close("plain torch", torch.cat(want), plain, tolerance(dtype))
        has_options = triton_paged.has_options(sinks, slopes, chunk_size)
        refusal = triton_paged.gluon_refuses(q.to(device), on_device)
        for gluon in (False, True):
            if gluon and (has_options or refusal):
                continue
            config = default_attention_config(
                num_requests=len(counts),
                num_kv_heads=J,
                heads_per_kv_head=H // J,
                head_dim=D,
                element_size=dtype.itemsize,
                page_element_size=1,
                max_query_len=max(counts),
                max_context_len=max(lengths),
                window=window,
                sm_count=sm_count(device),
                gluon=gluon,
            )
            config = config if split is None else replace(config, split=split)
            got = triton_paged.paged_attention(
                qkv.to(device)[:, :H], on_device, step, **options, limbs=limbs, config=config
            )
            if limbs is not None:
                got = from_limbs(got).to(dtype).view(q.shape)
            assert_close(f"gluon {gluon}", torch.cat(want), got, 2 * tolerance(dtype))
        return got

    return run


def test_chunks_and_decodes_in_one_batch(check, dtype):
    check([1, 5, 1, 30, 2], [40, 5, 7, 70, 33], 4, 2, 32, 16, dtype)


@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_head_dims(check, dtype, D):
    check([2, 1], [20, 37], 2, 1, D, 16, dtype)


@pytest.mark.parametrize("H, J", [(1, 1), (3, 3), (7, 1), (14, 2), (16, 1)])
def test_query_heads_per_kv_head(check, half, H, J):
    check([1, 1], [19, 150], H, J, 64, 16, half)
    check([1, 4], [19, 21], H, J, 128, 16, half)


@pytest.mark.parametrize("B", [16, 32, 64, 128])
def test_contexts_at_page_edges(check, half, B):
    """Decodes, and a chunk whose first steps need no mask."""
    check([1, 1, 1, 3], [B - 1, B, B + 1, 2 * B + 1], 2, 1, 64, B, half)
    check([40, 1], [3 * B + 30, 2], 4, 2, 32, B, half)


@pytest.mark.parametrize("window", [1, 7, 64, 65, 1000])
def test_window_edges(check, half, window):
    check([1, 9, 1], [200, 80, 3], 4, 1, 64, 32, half, window)


@pytest.mark.parametrize("split", [2, 8, pytest.param(32, marks=exhaustive)])
@pytest.mark.parametrize("window", [None, 50])
def test_splits_of_a_context_merge(check, half, split, window):
    check([1, 1, 1, 1], [300, 1, 65, 129], 4, 2, 64, 16, half, window, split)
    check([3, 1, 2], [130, 64, 200], 4, 2, 128, 16, half, window, split)


def test_scales_of_very_different_size(check, half):
    check([1, 20], [100, 50], 4, 1, 64, 16, half, spread=2**10)


def test_result_as_limbs(check, half):
    form = LimbForm(bits=4, with_sums=True)
    check([1, 2, 1], [300, 2, 65], 4, 2, 64, 16, half, None, 4, limbs=form)


@pytest.mark.parametrize("split", [None, 4])
def test_soft_cap_sinks_alibi_and_chunked_attention(check, half, split):
    """A soft cap, sinks, ALiBi, chunked attention; decodes and a chunk."""
    sinks, slopes = torch.tensor([-3.0, 0.0, 2.0, 9.0]), torch.tensor([0.5, 0.125, 2.0, 0.0])
    shape = [1, 40, 1], [40, 110, 7], 4, 2, 64, 16, half, None, split
    check(*shape, soft_cap=3.0)
    check(*shape, sinks=sinks)
    check(*shape, slopes=slopes)
    check(*shape, chunk_size=23)


def test_requests_without_rows_or_keys(check, half):
    got = check([0, 1, 0, 1, 0], [5, 20, 0, 0, 9], 2, 1, 64, 16, half)
    assert not got[1].any()


def test_invalid_pages_are_refused(device):
    """One error a fault: heads that no Hadamard matrix fits, pairs of another shape, no pairs."""
    from qkernels.errors import KernelError

    step = AttentionStep(
        block_tables_RX=torch.zeros(1, 1, dtype=torch.int32, device=device),
        query_starts_R1=torch.tensor([0, 1], dtype=torch.int32, device=device),
        context_lengths_R=torch.ones(1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_context_len=1,
    )

    def attend(D, **changed):
        cache = replace(PagedKv.zeros((2, 16, 1, D), INT4_PAGES, device), **changed)
        q = torch.zeros(1, 2, D, device=device)
        return ops.paged_attention(q, cache, step, scale=1.0, window=None)

    assert attend(64).shape == (1, 2, 64)
    with pytest.raises(KernelError, match="32, 64, 128, 256, .*not 80"):
        attend(80)
    with pytest.raises(KernelError, match="k_scales.*found None"):
        attend(64, k_scales=None)
    with pytest.raises(KernelError, match="k_scales"):
        attend(64, k_scales=torch.zeros(2, 16, 1, 2, dtype=torch.float16, device=device))
    with pytest.raises(KernelError, match="static_scales"):
        attend(64, static_scales=True)
