"""Sort (token, expert) pairs by expert, and sum the experts' outputs of each token, in Triton.

Legend: M tokens, E experts, k experts per token, P = M k pairs, C hidden size.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.moe.config import sort_chunk


def sort_pairs(ids_Mk: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs sorted by expert, int32 [P], and the number of pairs per expert, int32 [E].

    The sort is stable. A block per expert counts and writes its own pairs, so no block waits for
    another. Pairs of experts of other ranks (id E) are left out; the last elements, which would
    hold them, are undefined.
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
    y_PC: torch.Tensor,
    top_k: int,
    shared_MC: torch.Tensor | None,
    out_MC: torch.Tensor,
    ids_Mk: torch.Tensor | None = None,
    num_experts: int = 0,
) -> None:
    """Write the sum of the weighted outputs of each token's experts, plus `shared`.

    `ids` is given if other ranks hold some experts; outputs of these are undefined and not added.
    """
    M, C = out_MC.shape
    block = min(1024, power_of_two(C))
    with on_device(y_PC):
        launch(
            _sum_pairs,
            (M, ceil_div(C, block)),
            y_PC,
            shared_MC,
            out_MC,
            ids_Mk,
            C,
            num_experts,
            TOP_K=top_k,
            BLOCK=block,
            num_warps=4,
            **pdl_options(y_PC, M),
        )


@triton.jit(do_not_specialize=["E"])
def _sum_pairs(
    y_ptr,
    shared_ptr,
    out_ptr,
    ids_ptr,
    C,
    E,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_launch_and_wait()
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        end = C
        if ids_ptr is not None:
            end = tl.where(tl.load(ids_ptr + token * TOP_K + j) < E, C, 0)
        total += tl.load(y_ptr + (token * TOP_K + j) * C + c, mask=c < end, other=0.0).to(
            tl.float32
        )
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * C + c, mask=c < C, other=0.0).to(tl.float32)
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32) + shared
    tl.store(out_ptr + token * C + c, total.to(out_ptr.dtype.element_ty), mask=c < C)
