"""Paged attention to fuzz."""

import random

import torch

from qkernels.attention import reference as attention_reference
from qkernels.attention import triton_paged as paged_attention
from tests.qkernels.flat_attention import run_attention
from tests.qkernels.fuzz.fuzzer import FuzzedOp
from tests.qkernels.fuzz.values import BOOLS, DEVICE, EPS, FLOAT, assert_near, generator, rows


def fuzz_paged_attention(
    *,
    R,
    max_count,
    max_length,
    J,
    group,
    D,
    B,
    window,
    soft_cap,
    slopes,
    chunk_size,
    codes,
    interleaved,
    dtype,
    seed,
):
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, B, rng.randint(1, max_length))) for _ in range(R)]
    counts = [min(length, rng.choice((0, 1, 1, max_count))) for length in lengths]
    lengths[0], counts[0] = max_length, min(max_count, max_length)
    X, H, T = -(-max(lengths) // B), J * group, sum(counts)
    # unused memory holds NaN, so that reading it shows
    pages = torch.full((R * X + 2, B, 2, J, D), float("nan"))
    tables = torch.randperm(R * X + 2, generator=generator(seed))[: R * X].view(R, X).int()
    for r, length in enumerate(lengths):
        t = torch.arange(length)
        kv = torch.randn(length, 2, J, D, generator=generator(seed + r))
        pages[tables[r, t // B].long(), t % B] = kv
        tables[r, -(-length // B) :] = -7  # stale
    scales = {}
    if codes:  # of size 1 after the scale, which is NaN where nothing was written
        step = {"int8": 40, "float8_e4m3fn": 8}[codes]
        written = torch.where(pages.isnan().any((2, 4)), torch.nan, 1 / step).to(DEVICE)
        scales = {"k_scales": written.clone(), "v_scales": written}
        pages = (pages.nan_to_num(1) * step).clamp(-128, 127)
        pages = pages.round() if codes == "int8" else pages
    pages = pages.to(getattr(torch, codes or dtype)).to(DEVICE)
    k_pages, v_pages = pages.unbind(2)
    if not interleaved:
        k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()
    q = rows((T, H + 2, D), dtype, seed)[:, :H]
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    shared = {
        "scale": D**-0.5,
        "window": window if chunk_size is None else None,
        "slopes_H": 2.0 ** -torch.arange(H, device=DEVICE) if slopes else None,
        "chunk_size": chunk_size,
        "max_query_len": max(counts),
        "max_context_len": max(lengths),
        "soft_cap": soft_cap,
        **scales,
    }
    arguments = (tables.to(DEVICE), starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    got = run_attention(paged_attention, q, k_pages, v_pages, *arguments, **shared)
    twin = (q, k_pages, v_pages) if codes else (q, k_pages.float(), v_pages.float())
    want = run_attention(attention_reference, q.float(), *twin[1:], *arguments, **shared)
    # the kernel rounds probabilities to the pages' dtype; values are of size 1
    bound = EPS[dtype] * want.abs() + (2 * EPS[dtype] if dtype != "float32" else 1e-5)
    assert_near("paged_attention", want, got, bound)


ATTENTION: dict[str, FuzzedOp] = {
    "paged_attention": FuzzedOp(
        run=fuzz_paged_attention,
        fields={
            "R": (1, 2, 3, 7, 20),
            "max_count": (1, 2, 17, 64, 70, 200),
            "max_length": (1, 15, 16, 17, 64, 129, 500, 1100, 4000),
            "J": (1, 2, 8),
            "group": (1, 2, 3, 4, 7, 16),
            "D": (16, 32, 64, 80, 128, 256, 512),
            "B": (16, 32, 64, 128),
            "window": (None, 1, 7, 64, 100, 1000),
            "soft_cap": (None, None, 5.0),
            "slopes": (False, False, True),
            "chunk_size": (None, None, 1, 50, 1024),
            "codes": ("", "", "int8", "float8_e4m3fn"),
            "interleaved": BOOLS,
            "dtype": FLOAT,
        },
        dynamic=("R", "max_count", "max_length", "interleaved"),
        cost=lambda *, R, max_count, max_length, J, group, D, **_: (
            R * max_count * max_length * J * group * D
        ),
    ),
}
