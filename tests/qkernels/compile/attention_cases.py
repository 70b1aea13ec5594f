"""Calls of attention and of what writes its pages, for cases.py."""

import torch

from qkernels import ops
from qkernels.attention.cache import INT4_PAGES
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import SplitKPartials, split_heads
from tests.qkernels.compile.cards import empty
from tests.qkernels.flat_attention import paged_kv, run_attention


def pairs_of(P: int, B: int, J: int, count: int) -> torch.Tensor:
    """Scales and zeros of 4-bit pages, in the order in memory that the engine keeps."""
    return torch.ones(P, J, B, count, dtype=torch.float16).transpose(1, 2)


def attention(
    counts: list[int],
    context: int = 8192,
    D: int = 128,
    group: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    pages: torch.dtype | None = None,
    page: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    limbs: LimbForm | None = None,
    static: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    chunk_size: int | None = None,
    kernel: str | None = None,
    images: bool = False,
) -> None:
    R, J = len(counts), 8
    P = R * context // page
    width = D // 2 if pages == INT4_PAGES else D
    k_pages, v_pages = (empty(P, page, J, width, dtype=pages or dtype) for _ in range(2))
    scales = {}
    if pages == INT4_PAGES:
        scales = {"k_scales": pairs_of(P, page, J, 4), "v_scales": pairs_of(P, page, J, 2)}
    elif pages is not None:
        one = torch.ones(()).expand(P, page, J) if static else torch.ones(P, J, page).mT
        scales = {"k_scales": one, "v_scales": one}
    run_attention(
        ops,
        empty(sum(counts), J * group, D, dtype=dtype),
        k_pages,
        v_pages,
        torch.zeros(R, context // page, dtype=torch.int32),
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.full((R,), context, dtype=torch.int32),
        scale=D**-0.5,
        window=window,
        soft_cap=soft_cap,
        max_query_len=max(counts),
        max_context_len=context,
        limbs=limbs,
        slopes_H=torch.ones(J * group) if alibi else None,
        sinks_H=torch.ones(J * group) if sinks else None,
        chunk_size=chunk_size,
        kernel=kernel,
        last_keys=torch.zeros(sum(counts), dtype=torch.int64) if images else None,
        **scales,
    )


def kv_write(
    tokens: int = 1,
    D: int = 128,
    pages: torch.dtype | None = None,
    rotate: bool = True,
    norm: bool = False,
    splits: int = 0,
    interleaved: bool = False,
    norm_dtype: torch.dtype = torch.bfloat16,
) -> None:
    H, J, B, P = 32, 8, 16, 64
    width = D // 2 if pages == INT4_PAGES else D
    k_pages, v_pages = (empty(P, B, J, width, dtype=pages or torch.bfloat16) for _ in range(2))
    slots = torch.arange(tokens)
    scales = [] if pages is None else [torch.ones(P, B, J) for _ in range(2)]
    if pages == INT4_PAGES:
        scales = [pairs_of(P, B, J, count) for count in (4, 2)]
    cache = paged_kv(k_pages, v_pages, *scales)
    heads = empty(tokens, (H + 2 * J) * D)
    if splits:
        parts = empty(splits, tokens, (H + 2 * J) * D, dtype=torch.float32)
        heads = SplitKPartials(parts=parts, dtype=torch.bfloat16)
    q, k, v = split_heads(heads, (H, J, J), D)
    if not rotate:
        ops.write_kv_(k, v, cache, slots)
        return
    settings = {"interleaved": interleaved, "inputs_ready": True}
    if norm:
        weights = [empty(D, dtype=norm_dtype) for _ in range(2)]
        settings |= {"q_norm_D": weights[0], "k_norm_D": weights[1], "eps": 1e-5}
    cos_sin = empty(64, D, dtype=torch.float32)
    ops.rope_write_kv_(q, k, v, cos_sin, slots, cache, slots, **settings)
