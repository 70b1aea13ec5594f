"""Calls of attention and of what writes its pages."""

import torch

from qkernels import ops
from qkernels.attention.cache import INT4_PAGES
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import SplitKPartials, split_heads
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import FP8, FP16, FP32, INT8, SM80, SM90, Case
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


ATTENTION: dict[str, Case] = {
    "decode, split": Case(
        run=lambda: attention([1]), quick=("sm_89", "sm_90", "sm_100"), product="mma"
    ),
    "decode, many": Case(run=lambda: attention([1] * 256, 512), product="mma"),
    "decode to limbs": Case(
        run=lambda: attention([1], limbs=LimbForm(bits=4, with_sums=True)), product="mma"
    ),
    "decode, int8": Case(
        run=lambda: attention([1] * 64, 1024, pages=INT8), quick=SM80, product="mma"
    ),
    "decode, int8, blocks of two warps": Case(
        run=lambda: attention([1] * 132, 512, pages=INT8), product="mma"
    ),
    "decode, int8, blocks of one warp": Case(
        run=lambda: attention([1] * 264, 512, pages=INT8), quick=SM90, product="mma"
    ),
    "decode, int4, blocks of one warp": Case(
        run=lambda: attention([1] * 264, 512, pages=INT4_PAGES), product="mma"
    ),
    "decode, int8, split, window": Case(
        run=lambda: attention([1], pages=INT8, window=5000), product="mma"
    ),
    "decode, int8, head 64": Case(
        run=lambda: attention([1] * 64, 1024, D=64, pages=INT8), product="mma"
    ),
    "decode, int4": Case(
        run=lambda: attention([1] * 64, 4096, pages=INT4_PAGES),
        quick=("sm_80", "sm_90"),
        product="mma",
    ),
    "decode, int4, split, window": Case(
        run=lambda: attention([1], pages=INT4_PAGES, window=5000), product="mma"
    ),
    "decode, int4, head 64, soft cap": Case(
        run=lambda: attention([1] * 64, 1024, D=64, pages=INT4_PAGES, soft_cap=30.0),
        product="mma",
    ),
    "decode, int4, head 256, sinks": Case(
        run=lambda: attention([1] * 16, D=256, group=8, pages=INT4_PAGES, sinks=True),
        product="mma",
    ),
    "decode, float8, soft cap": Case(
        run=lambda: attention([1] * 64, 1024, pages=FP8, soft_cap=30.0), product="mma", least=89
    ),
    "chunk": Case(
        run=lambda: attention([2048, 2048]),
        quick=SM90,
        product="wgmma",
    ),
    "chunk, page 128": Case(run=lambda: attention([2048, 2048], page=128), product="wgmma"),
    "chunk, head 256, window": Case(
        run=lambda: attention([2048], D=256, group=2, window=1024), product="wgmma"
    ),
    "chunk, head 80, float16, split": Case(
        run=lambda: attention([128], 32768, D=80, group=7, page=64, dtype=FP16), product="wgmma"
    ),
    "chunk, window, soft cap": Case(
        run=lambda: attention([2048], window=1000, soft_cap=30.0), product="wgmma"
    ),
    "decode, head 256, window, soft cap": Case(
        run=lambda: attention([1] * 32, 4096, D=256, group=2, window=1000, soft_cap=50.0),
        product="mma",
    ),
    "chunk, head 256, window, soft cap": Case(
        run=lambda: attention([2048], D=256, group=2, window=1000, soft_cap=50.0),
        product="wgmma",
    ),
    "chunk, int4": Case(
        run=lambda: attention([2048], pages=INT4_PAGES), quick=SM90, product="wgmma"
    ),
    "chunk, int4, head 64, float16": Case(
        run=lambda: attention([2048], D=64, pages=INT4_PAGES, dtype=FP16), product="wgmma"
    ),
    "chunk, int4, head 256, window": Case(
        run=lambda: attention([2048], D=256, group=2, pages=INT4_PAGES, window=1000), product="mma"
    ),
    "chunk, int4, head 64, float32": Case(
        run=lambda: attention([2048], D=64, pages=INT4_PAGES, dtype=FP32)
    ),
    "chunk, int8": Case(run=lambda: attention([2048], pages=INT8), product="wgmma"),
    "chunk, int8, head 256": Case(
        run=lambda: attention([2048], D=256, group=2, pages=INT8), product="wgmma"
    ),
    "chunk, int8, one scale": Case(
        run=lambda: attention([128], 32768, D=80, group=7, pages=INT8, static=True, dtype=FP16),
        product="wgmma",
    ),
    "chunk, float8, head 256": Case(
        run=lambda: attention([2048], D=256, group=2, pages=FP8), product="wgmma", least=89
    ),
    "chunk, float8, window, soft cap": Case(
        run=lambda: attention([2048], pages=FP8, window=1000, soft_cap=30.0),
        product="wgmma",
        least=89,
    ),
    "chunk, float32": Case(run=lambda: attention([2048], dtype=FP32)),
    "kv write": Case(run=lambda: kv_write(rotate=False)),
    "kv write, int8": Case(run=lambda: kv_write(pages=INT8, rotate=False)),
    "rope and kv write": Case(run=kv_write, quick=("sm_80", "sm_89", "sm_120")),
    "rope and kv write, int8, norms": Case(run=lambda: kv_write(pages=INT8, norm=True)),
    "rope and kv write, int8, widest": Case(run=lambda: kv_write(D=1024, pages=INT8)),
    "rope and kv write, float8": Case(run=lambda: kv_write(pages=FP8), least=89),
    "rope and kv write, int4": Case(run=lambda: kv_write(pages=INT4_PAGES), quick=SM90),
    "rope of split-K sums and kv write, int4, head 256, norms": Case(
        run=lambda: kv_write(40, D=256, pages=INT4_PAGES, norm=True, splits=5)
    ),
    "kv write, int4, head 32": Case(run=lambda: kv_write(D=32, pages=INT4_PAGES, rotate=False)),
    "rope of split-K sums and kv write, int8, norms": Case(
        run=lambda: kv_write(40, pages=INT8, norm=True, splits=5), quick=SM90
    ),
    "rope of most split-K sums and kv write": Case(run=lambda: kv_write(splits=16)),
    "rope of neighbours and kv write": Case(run=lambda: kv_write(interleaved=True)),
    "rope of split-K sums and kv write, head 256, float32 norms": Case(
        run=lambda: kv_write(40, D=256, norm=True, splits=5, norm_dtype=FP32)
    ),
    "fixed order, decode": Case(
        run=lambda: attention([1], kernel="fixed_order"), quick=SM90, product="mma"
    ),
    "fixed order, decode of many": Case(
        run=lambda: attention([1] * 64, D=80, group=7, window=1000, kernel="fixed_order"),
        product="mma",
    ),
    "fixed order, verify": Case(
        run=lambda: attention([4] * 2, 1024, D=64, soft_cap=30.0, kernel="fixed_order"),
        product="mma",
    ),
    "chunk, sinks": Case(
        run=lambda: attention([2048], D=64, group=8, window=128, sinks=True), product="wgmma"
    ),
    "fixed order, decode with sinks": Case(
        run=lambda: attention([1], D=64, group=8, sinks=True, kernel="fixed_order"), product="mma"
    ),
    "fixed order, chunk with sinks": Case(
        run=lambda: attention([2048], D=64, group=8, sinks=True, kernel="fixed_order"),
        product="wgmma",
    ),
    "fixed order, chunk": Case(
        run=lambda: attention([2048], kernel="fixed_order"), quick=SM90, product="wgmma"
    ),
    "fixed order, chunk with images": Case(
        run=lambda: attention(
            [2048], D=256, group=2, window=1024, images=True, kernel="fixed_order"
        )
    ),
    "fixed order, chunk in a window": Case(
        run=lambda: attention([2048], window=1000, soft_cap=30.0, kernel="fixed_order"),
        product="wgmma",
    ),
    "decode, head 512": Case(run=lambda: attention([1] * 16, 4096, D=512, group=8), product="mma"),
    "chunk, head 512": Case(
        run=lambda: attention([2048], 4096, D=512, group=8), quick=SM90, product="mma"
    ),
    "chunk, head 512, int8": Case(
        run=lambda: attention([2048], 4096, D=512, group=8, pages=INT8), product="mma"
    ),
    "decode, ALiBi": Case(
        run=lambda: attention([1] * 64, 2048, group=1, alibi=True), product="mma"
    ),
    "chunk, ALiBi": Case(
        run=lambda: attention([2048], group=1, alibi=True), quick=SM90, product="wgmma"
    ),
    "decode, chunked attention": Case(
        run=lambda: attention([1] * 64, 16384, group=5, chunk_size=8192), product="mma"
    ),
    "chunk, chunked attention": Case(
        run=lambda: attention([2048], 16384, group=5, chunk_size=8192), product="wgmma"
    ),
    "fixed order over 8 bits, decode": Case(
        run=lambda: attention([1], pages=torch.int8, kernel="fixed_order"),
        quick=SM90,
        product="mma",
    ),
    "fixed order over 8 bits, chunk": Case(
        run=lambda: attention([2048], pages=torch.float8_e4m3fn, kernel="fixed_order"), least=89
    ),
    "fixed order over 8 bits, chunk in a window": Case(
        run=lambda: attention(
            [2048], pages=torch.int8, window=1000, soft_cap=30.0, kernel="fixed_order"
        )
    ),
}
