"""Problems for the attention of chunks on sm_90, judged by float64."""

import pytest
import torch

from qkernels.gpu.workspace import workspace
from tests.qkernels.flat_attention import run_attention
from tests.qkernels.gpu.attention_prefill.exact import exact


@pytest.fixture
def problem():
    """Arguments of paged_attention, and each request's own keys and values."""

    def make(counts, lengths, H, J, D, B, dtype, interleaved=False, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed + D + B + len(counts))
        R, X = len(counts), max(1, -(-max(lengths) // B))
        # unused pages and tails hold NaN: reading one shows
        pages = torch.full((R * X + 2, B, 2, J, D), float("nan"), device="cuda", dtype=dtype)
        order = torch.randperm(R * X + 2, device="cuda", generator=generator)
        tables = order[: R * X].view(R, X).int()
        own = []
        for r, length in enumerate(lengths):
            kv = torch.randn(length, 2, J, D, device="cuda", generator=generator).to(dtype)
            own.append(kv.unbind(1))
            t = torch.arange(length, device="cuda")
            pages[tables[r, t // B].long(), t % B] = kv
            tables[r, -(-length // B) :] = -7  # stale
        k_pages, v_pages = pages.unbind(2)
        if not interleaved:
            k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()
        T = sum(counts)
        qkv = torch.randn(T, H + 2, D, device="cuda", generator=generator).to(dtype)
        starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        return (qkv[:, :H], k_pages, v_pages, tables, starts, lengths), own

    return make


@pytest.fixture
def coded_problem(problem):
    """`problem` over 8-bit pages, and their scales: NaN where no request has a key."""

    def make(codes, *shape, interleaved=False, spread=1.0, size=1.0, static=False, seed=0):
        (q, k, v, tables, starts, lengths), _ = problem(*shape, seed=seed)
        generator = torch.Generator("cuda").manual_seed(seed + 1)
        pages, scales = [], []
        for values in (k, v):
            missing = values[..., 0].isnan()
            values = values.float() * 30
            if codes is torch.int8:
                values = values.nan_to_num(113)
            pages.append(values.to(codes))
            if static:
                one = torch.rand((), device="cuda", generator=generator) * size / 30
                scales.append(one.expand(missing.shape))
                continue
            P, B, J = missing.shape
            scale = torch.rand(P, J, B, device="cuda", generator=generator).transpose(1, 2)
            scale = spread**scale * size / 30
            scales.append(scale.masked_fill_(missing, float("nan")))
        if interleaved:
            pages = torch.stack(pages, 2).unbind(2)
            scales = torch.stack(scales, 2).unbind(2)
        own = []
        for r, length in enumerate(lengths.tolist()):
            t = torch.arange(length, device="cuda")
            index = tables[r, t // k.shape[1]].long(), t % k.shape[1]
            both = zip(pages, scales, strict=True)
            own.append([p[index].double() * s[index].double()[..., None] for p, s in both])
        scales = {"k_scales": scales[0], "v_scales": scales[1]}
        return (q, *pages, tables, starts, lengths), scales, own

    return make


@pytest.fixture
def check(problem, coded_problem, assert_close, tolerance, poison):
    from qkernels.attention import sm90_prefill

    def run(
        counts,
        lengths,
        H,
        J,
        D,
        B,
        dtype,
        window=None,
        soft_cap=None,
        interleaved=False,
        codes=None,  # dtype of 8-bit pages
        spread=1.0,  # largest over smallest scale of theirs
        size=1.0,  # of their keys and values
        static=False,  # one scale for all
        sinks=False,
        **changes,
    ):
        shape = counts, lengths, H, J, D, B, dtype
        shared = {"scale": D**-0.5, "window": window, "soft_cap": soft_cap}
        if codes is None:
            arguments, own = problem(*shape, interleaved)
        else:
            arguments, scales, own = coded_problem(
                codes, *shape, interleaved=interleaved, spread=spread, size=size, static=static
            )
            changes |= scales
        if sinks:
            shared["sinks_H"] = torch.linspace(-3, 9, H, device="cuda")
        maxima = {"max_query_len": max(counts), "max_context_len": max(lengths)}
        got = run_attention(sm90_prefill, *arguments, **shared, **maxima, **changes)
        again = run_attention(sm90_prefill, *arguments, **shared, **maxima, **changes)
        assert torch.equal(got, again), "equal inputs, equal bits"
        assert not workspace(got.device)[1].any(), "the counter is left at zero"
        rows = arguments[0].split(counts)
        want = [
            exact(q, k, v, length, **shared)
            for q, (k, v), length in zip(rows, own, lengths, strict=True)
        ]
        # a score as large as the scales is rounded in float32 before it becomes a power
        allowed = tolerance(dtype) + 2**-24 * max(1, spread)
        assert_close("chunk attention", torch.cat(want), got, allowed)
        return got

    return run
