"""The choice of experts, pairs in order of their experts, and sums over a token's experts.

Legend: M tokens, E experts, k experts of a token, P = M k pairs, C hidden size.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.moe.config import sort_chunk
from qkernels.moe.routing import Routes, Routing


def route(
    logits_ME: torch.Tensor, routing: Routing, correction_E: torch.Tensor | None = None
) -> Routes:
    """As ops.route. Of equal scores the lowest expert is chosen."""
    M, E = logits_ME.shape
    k, G = routing.top_k, routing.num_groups
    logits_ME = logits_ME.contiguous()
    ids_Mk = torch.empty((M, k), dtype=torch.int32, device=logits_ME.device)
    shares_Mk = torch.empty((M, k), dtype=torch.float32, device=logits_ME.device)
    if M == 0:
        return Routes(ids_Mk, shares_Mk)
    with on_device(logits_ME):
        launch(
            _route,
            (M,),
            logits_ME,
            correction_E,
            ids_Mk,
            shares_Mk,
            E,
            routing.factor,
            SCORES=routing.scores,
            NORMALIZED=routing.normalized,
            ROUNDED=routing.rounded,
            TOP_K=k,
            SLOTS=power_of_two(k),
            GROUPS=G,
            PADDED_GROUPS=power_of_two(G),
            IN_GROUP=power_of_two(E // G),
            TOP_GROUPS=routing.top_groups,
            BY_TWO=routing.group_score == "top2",
            num_warps=1,
            **pdl_options(logits_ME, M),
        )
    return Routes(ids_Mk, shares_Mk)


@triton.jit
def _first_largest(values, order, NONE: tl.constexpr):
    """The lowest number in `order` of those with the largest value."""
    best = tl.max(values)
    return tl.min(tl.where(values == best, order, NONE))


@triton.jit
def _route(
    logits_ptr,  # [M, E]
    correction_ptr,  # [E] or None
    ids_ptr,  # [M, TOP_K]
    shares_ptr,  # [M, TOP_K]
    E,
    factor,
    SCORES: tl.constexpr,
    NORMALIZED: tl.constexpr,
    ROUNDED: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    IN_GROUP: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
    PDL: tl.constexpr,
):
    NONE: tl.constexpr = 1 << 30
    if PDL:
        pdl_launch_and_wait()
    token = tl.program_id(0).to(tl.int64)
    size = E // GROUPS
    g, s = tl.arange(0, PADDED_GROUPS), tl.arange(0, IN_GROUP)
    e = g[:, None] * size + s[None, :]
    mask = (g[:, None] < GROUPS) & (s[None, :] < size)
    logits = tl.load(logits_ptr + token * E + e, mask=mask, other=-float("inf")).to(tl.float32)
    if SCORES == "softmax":
        exps = tl.exp(logits - tl.max(logits))
        scores = exps / tl.sum(exps)
    elif SCORES == "sigmoid":
        scores = 1 / (1 + tl.exp(-logits))
    else:
        scores = logits
    choice = scores
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + e, mask=mask, other=0.0)
    choice = tl.where(mask, choice, -float("inf"))
    if TOP_GROUPS < GROUPS:
        best = tl.max(choice, 1)
        if BY_TWO:
            # of equal scores one alone is left out
            at = tl.min(tl.where(choice == best[:, None], s[None, :], NONE), 1)
            best += tl.max(tl.where(s[None, :] == at[:, None], -float("inf"), choice), 1)
        best = tl.where(g < GROUPS, best, -float("inf"))
        kept = g < 0
        for _ in tl.static_range(TOP_GROUPS):
            chosen = _first_largest(best, g, NONE)
            kept |= g == chosen
            best = tl.where(g == chosen, -float("inf"), best)
        choice = tl.where(kept[:, None], choice, -float("inf"))
    j = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    shares = tl.full((SLOTS,), -float("inf"), tl.float32)
    left = mask
    for i in tl.static_range(TOP_K):
        # among those left, so that one is found even where all scores are NaN or -inf
        best_score = tl.max(tl.where(left, choice, -float("inf")))
        candidates = left & (choice >= best_score)
        chosen = tl.min(tl.where(candidates, e, NONE))
        chosen = tl.where(chosen == NONE, tl.min(tl.where(left, e, NONE)), chosen)
        share = tl.sum(tl.where(e == chosen, tl.where(mask, scores, 0.0), 0.0))
        ids = tl.where(j == i, chosen, ids)
        shares = tl.where(j == i, share, shares)
        left = left & (e != chosen)
    if SCORES == "softmax_of_chosen":
        exps = tl.exp(shares - tl.max(shares))
        shares = exps / tl.sum(exps)
    shares = tl.where(j < TOP_K, shares, 0.0)
    if NORMALIZED:
        shares = shares / (tl.sum(shares) + 1e-20)
    shares = shares * factor
    if ROUNDED:
        shares = shares.to(logits_ptr.dtype.element_ty).to(tl.float32)
    tl.store(ids_ptr + token * TOP_K + j, ids, mask=j < TOP_K)
    tl.store(shares_ptr + token * TOP_K + j, shares, mask=j < TOP_K)


def sort_pairs(ids_Mk: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs in order of their experts, int32 [P], and each expert's number of pairs, int32 [E].

    Of one expert they stay in order. A block for each expert counts and places its own, so none
    waits for another.
    """
    P = ids_Mk.numel()
    sorted_P = torch.empty((P,), dtype=torch.int32, device=ids_Mk.device)
    counts_E = torch.empty((num_experts,), dtype=torch.int32, device=ids_Mk.device)
    chunk = sort_chunk(P)
    with on_device(ids_Mk):
        launch(
            _sort_pairs,
            (num_experts,),
            ids_Mk,
            sorted_P,
            counts_E,
            P,
            CHUNK=chunk,
            num_warps=max(1, chunk // 512),
            **pdl_options(ids_Mk, ids_Mk.shape[0]),
        )
    return sorted_P, counts_E


@triton.jit(do_not_specialize=["P"])
def _sort_pairs(ids_ptr, sorted_ptr, counts_ptr, P, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        pdl_launch_and_wait()
    expert = tl.program_id(0)
    before = 0
    for start in tl.range(0, P, CHUNK):
        p = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + p, mask=p < P, other=1 << 30)
        before += tl.sum((ids < expert).to(tl.int32), 0)
    count = 0
    for start in tl.range(0, P, CHUNK):
        p = start + tl.arange(0, CHUNK)
        own = tl.load(ids_ptr + p, mask=p < P, other=1 << 30) == expert
        rank = tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(sorted_ptr + before + count + rank, p, mask=own)
        count += tl.sum(own.to(tl.int32), 0)
    tl.store(counts_ptr + expert, count)


def sum_pairs(
    y_PC: torch.Tensor, top_k: int, shared_MC: torch.Tensor | None, out_MC: torch.Tensor
) -> None:
    """Write the sums over each token's experts, whose outputs are weighted, plus `shared`."""
    M, C = out_MC.shape
    block = min(1024, power_of_two(C))
    with on_device(y_PC):
        launch(
            _sum_pairs,
            (M, ceil_div(C, block)),
            y_PC,
            shared_MC,
            out_MC,
            C,
            TOP_K=top_k,
            BLOCK=block,
            num_warps=4,
            **pdl_options(y_PC, M),
        )


@triton.jit
def _sum_pairs(
    y_ptr, shared_ptr, out_ptr, C, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        pdl_launch_and_wait()
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(y_ptr + (token * TOP_K + j) * C + c, mask=c < C, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * C + c, mask=c < C, other=0.0).to(tl.float32)
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32) + shared
    tl.store(out_ptr + token * C + c, total.to(out_ptr.dtype.element_ty), mask=c < C)
