"""Calls of latent attention and of what writes its pages: sizes of DeepSeek's."""

import torch

from qkernels import ops
from qkernels.attention.cache import AttentionStep
from qkernels.attention.selected import triton_scores as block_kernel
from qkernels.gpu import device
from qkernels.latent.cache import PagedLatents
from qkernels.latent.selected import triton_scores
from qkernels.latent.selected.selected_keys import SelectedKeys
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import FP16, FP32, INT8, SM90, Case

LATENT, ROPE, PAGE = 512, 64, 16


def latent_attention(
    counts: list[int],
    heads: int,
    context: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    kernel: str | None = None,
    codes: torch.dtype | None = None,
    latent: int = LATENT,
) -> None:
    R, T = len(counts), sum(counts)
    P = R * context // PAGE
    cache = PagedLatents(
        pages=empty(P, PAGE, latent + ROPE, dtype=codes or dtype),
        scales=None if codes is None else empty(P, PAGE, 2, dtype=torch.float32),
    )
    step = AttentionStep(
        block_tables_RX=torch.zeros(R, context // PAGE, dtype=torch.int32),
        query_starts_R1=torch.tensor([0, *counts]).cumsum(0).int(),
        context_lengths_R=torch.full((R,), context, dtype=torch.int32),
        max_query_len=max(counts),
        max_context_len=context,
    )
    ops.rope_write_latents_(
        empty(T, heads, ROPE, dtype=dtype),
        empty(T, latent + ROPE, dtype=dtype),
        empty(latent, dtype=dtype),
        empty(context, ROPE, dtype=torch.float32),
        torch.zeros(T, dtype=torch.int64),
        cache,
        torch.zeros(T, dtype=torch.int64),
        eps=1e-6,
        interleaved=True,
    )
    q_THE = empty(T, heads, latent + ROPE, dtype=dtype)
    ops.latent_attention(q_THE, cache, step, latent_width=latent, scale=1.0, kernel=kernel)


def heads_product(T: int, heads: int = 16, inputs: int = 128, outputs: int = LATENT) -> None:
    """Absorption of queries, in fixed order."""
    x = empty(T, heads, inputs + ROPE)[..., :inputs]
    ops.fixed_order_heads(x, empty(heads, inputs, outputs))


def selected(rows: int, heads: int, most: int = 2048, latent: int = LATENT) -> None:
    """Scores of an indexer with 64 heads, and attention over what it selects."""
    tables = torch.zeros(rows, 8192 // PAGE, dtype=torch.int32)
    rows_N = torch.zeros(rows, dtype=torch.int32)
    step = (empty(8192, PAGE, 128), tables, rows_N, rows_N)
    weights = empty(rows, 64, dtype=torch.float32)
    triton_scores.index_scores(empty(rows, 64, 128), weights, *step, num_keys=8192)
    chosen = torch.zeros(rows, most, dtype=torch.int32)
    ops.selected_latent_attention(
        empty(rows, heads, latent + ROPE),
        PagedLatents(pages=empty(8192, PAGE, latent + ROPE)),
        SelectedKeys(slots_TS=chosen, counts_T=rows_N),
        latent_width=latent,
        scale=1.0,
    )


def block_scores(rows: int) -> None:
    """Scores of blocks of 128 keys, for four KV heads (MiniMax-M3)."""
    tables = torch.zeros(rows, 8192 // PAGE, dtype=torch.int32)
    rows_N = torch.zeros(rows, dtype=torch.int32)
    step = (empty(8192, PAGE, 128), tables, rows_N, rows_N)
    block_kernel.block_scores(empty(rows, 4, 128), *step, num_keys=8192, block_size=128)


def sm90_decode(counts: list[int], heads: int) -> None:
    """Run the kernel for sm_90; on other cards, the portable one over one row."""
    if device.lacks_arch(torch.device("cuda"), "sm_90") is None:
        latent_attention(counts, heads, kernel="sm90_decode")
    else:
        latent_attention([1], 16)


LATENT_ATTENTION: dict[str, Case] = {
    "latent sm90_decode, 1 row": Case(
        run=lambda: sm90_decode([1], 16), quick=SM90, product="wgmma"
    ),
    "latent sm90_decode, 128 rows": Case(run=lambda: sm90_decode([1] * 128, 16), product="wgmma"),
    "latent sm90_decode, 128 rows of 20 heads": Case(
        run=lambda: sm90_decode([1] * 128, 20), quick=SM90, product="wgmma"
    ),
    "latent sm90_decode, 128 rows of 64 heads": Case(
        run=lambda: sm90_decode([1] * 128, 64), quick=SM90, product="wgmma"
    ),
    "latent sm90_decode, 16 rows of 128 heads": Case(
        run=lambda: sm90_decode([1] * 16, 128), product="wgmma"
    ),
    "latent sm90_decode, a chunk": Case(run=lambda: sm90_decode([1, 40], 20), product="wgmma"),
    "latent sm90_decode, drafts": Case(run=lambda: sm90_decode([4] * 32, 16), product="wgmma"),
    "latent attention, decode": Case(
        run=lambda: latent_attention([1], 16), quick=SM90, product="mma"
    ),
    "latent attention, decode of 20 heads": Case(
        run=lambda: latent_attention([1] * 8, 20), quick=SM90, product="mma"
    ),
    "latent attention, decode of 128 rows": Case(
        run=lambda: latent_attention([1] * 128, 128), product="mma"
    ),
    "latent attention, a prompt": Case(
        run=lambda: latent_attention([500], 16), quick=SM90, product="mma"
    ),
    "latent attention, 20 heads in float16": Case(
        run=lambda: latent_attention([1, 40], 20, dtype=FP16), product="mma"
    ),
    "latent attention in fixed order, decode": Case(
        run=lambda: latent_attention([1], 16, kernel="fixed_order"), quick=SM90, product="mma"
    ),
    "latent attention in fixed order, decode of 128 rows": Case(
        run=lambda: latent_attention([1] * 128, 128, kernel="fixed_order"), product="mma"
    ),
    "latent attention in fixed order, a prompt": Case(
        run=lambda: latent_attention([500], 16, kernel="fixed_order"), product="mma"
    ),
    "latent attention in fixed order, 8 bits": Case(
        run=lambda: latent_attention([1, 40], 20, codes=INT8, kernel="fixed_order"), product="mma"
    ),
    "selected blocks": Case(run=lambda: block_scores(100), quick=SM90, product="mma"),
    "selected keys, decode": Case(run=lambda: selected(1, 128), product="mma"),
    "selected keys, a prompt": Case(run=lambda: selected(500, 64), quick=SM90, product="mma"),
    "heads' products, 1 row": Case(run=lambda: heads_product(1), product="mma"),
    "heads' products, 500 rows": Case(run=lambda: heads_product(500)),
    "wide latents, decode": Case(
        run=lambda: latent_attention([1] * 8, 64, latent=1024), quick=SM90, product="mma"
    ),
    "wide latents, a prompt": Case(
        run=lambda: latent_attention([500], 64, latent=1024), product="mma"
    ),
    "wide latents, 8 bits": Case(
        run=lambda: latent_attention([1, 40], 64, codes=INT8, latent=1024), product="mma"
    ),
    "wide latents, windows": Case(
        run=lambda: selected(100, 64, most=513, latent=1024), product="mma"
    ),
    "latent attention in float32": Case(run=lambda: latent_attention([1, 40], 16, dtype=FP32)),
}
