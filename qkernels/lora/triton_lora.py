"""LoRA in Triton: A x for each row's adapter, then scale * B h added to the product.

There are two kernels, because every output of the second needs all inputs of the first. The first
runs before the base product, which prefetches its weights meanwhile (PDL); the second runs after
it. Data that no kernel of the step writes (slots, ranks, the first tile of A or B) is read before
the PDL wait. Legend: see weights.py; P parts of K, BM rows of a tile, BK, BN, BR its other sizes.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.gpu.workspace import workspace
from qkernels.lora.config import (
    MAX_SLICES,
    RANK_BLOCK,
    ExpandConfig,
    ShrinkConfig,
    expand_config,
    num_owners,
    shrink_config,
    whole_blocks,
)
from qkernels.lora.own_rows import own_slot
from qkernels.lora.weights import LoraWeights
from qkernels.operands.split_k import LinearOutput, SplitKPartials


def lora_shrink(
    x_TK: torch.Tensor,
    slots_T: torch.Tensor,
    weights: LoraWeights,
    config: ShrinkConfig | None = None,
) -> torch.Tensor:
    """Implement ops.lora_shrink; rows without an adapter are undefined.

    Partial sums that the kernel leaves (`config.adds_parts` False) are added here, in order.
    """
    config = config or shrink_config(*x_TK.shape, *_sizes(weights))
    if config.adds_parts or config.parts == 1:
        h_TSR = _empty_h(x_TK, weights, weights.max_rank)
        _launch_shrink(x_TK, slots_T, weights, config, h_TSR)
        return h_TSR
    h_PTSR = _empty_h(x_TK, weights, weights.max_rank, config.parts)
    _launch_shrink(x_TK, slots_T, weights, config, h_PTSR)
    first, *others = h_PTSR
    for part in others:
        first += part
    return first


def lora_shrink_parts(
    x_TK: torch.Tensor, slots_T: torch.Tensor, weights: LoraWeights
) -> torch.Tensor:
    """Implement ops.lora_term's A x as partial sums; rows without an adapter are undefined."""
    config = shrink_config(*x_TK.shape, *_sizes(weights), leaves_parts=True)
    parts = 1 if config.adds_parts else config.parts
    h_PTSR = _empty_h(x_TK, weights, whole_blocks(weights.max_rank), parts)
    _launch_shrink(x_TK, slots_T, weights, config, h_PTSR)
    return h_PTSR


def _sizes(weights: LoraWeights) -> tuple[int, int, int]:
    return weights.num_slices, weights.max_rank, weights.num_slots


def _empty_h(x_TK: torch.Tensor, weights: LoraWeights, R: int, *parts: int) -> torch.Tensor:
    of_rows = (x_TK.shape[0], weights.num_slices, R)
    return torch.empty((*parts, *of_rows), dtype=torch.float32, device=x_TK.device)


def _launch_shrink(
    x_TK: torch.Tensor,
    slots_T: torch.Tensor,
    weights: LoraWeights,
    config: ShrinkConfig,
    h: torch.Tensor,
) -> None:
    """Write h [T, S, R], or its partial sums if the kernel does not add them."""
    (T, K), S, R = x_TK.shape, weights.num_slices, h.shape[-1]
    adds = config.adds_parts and config.parts > 1
    h_PTSR = h.new_empty((config.parts, T, S, R)) if adds else h
    counters = workspace(x_TK.device)[1] if adds else None
    blocks = ceil_div(R, RANK_BLOCK)
    with on_device(x_TK):
        launch(
            _lora_shrink,
            (
                ceil_div(T, config.rows),
                config.parts * S * blocks,
                num_owners(T, weights.num_slots, config.rows),
            ),
            x_TK,
            slots_T,
            weights.a_LRSK,
            weights.ranks_LS,
            h,
            h_PTSR,
            counters,
            T,
            K,
            x_TK.stride(0),
            weights.a_LRSK.stride(0),
            weights.a_LRSK.stride(1),
            weights.ranks_LS.stride(0),
            R,
            S=S,
            PARTS=config.parts,
            BM=config.rows,
            BK=config.inputs,
            BR=RANK_BLOCK,
            WARPS=config.warps if config.by_warp else 1,
            ONE_STEP=config.inputs * config.parts >= K,
            BY_ROW=config.by_row,
            num_warps=config.warps,
            **pdl_options(x_TK, T),
        )


def lora_expand_(
    y_TN: LinearOutput,
    h_TSR: torch.Tensor,
    slots_T: torch.Tensor,
    weights: LoraWeights,
    config: ExpandConfig | None = None,
) -> None:
    """Add scale * B h to the rows of y that have an adapter.

    If y is split-K partial sums, the first one is changed.
    """
    out_TN = y_TN.parts[0] if isinstance(y_TN, SplitKPartials) else y_TN
    T, S, R = h_TSR.shape
    config = config or expand_config(T, weights.out_features, weights.num_slots)
    sizes = (*weights.sizes, 0, 0, 0)[:MAX_SLICES]
    with on_device(h_TSR):
        launch(
            _lora_expand,
            (
                ceil_div(T, config.rows),
                sum(ceil_div(size, config.outputs) for size in sizes),
                num_owners(T, weights.num_slots, config.rows),
            ),
            out_TN,
            h_TSR,
            slots_T,
            weights.b_LRN,
            weights.ranks_LS,
            weights.scales_LS,
            T,
            out_TN.stride(0),
            weights.b_LRN.stride(0),
            weights.b_LRN.stride(1),
            weights.ranks_LS.stride(0),
            weights.scales_LS.stride(0),
            R,
            S=S,
            N0=sizes[0],
            N1=sizes[1],
            N2=sizes[2],
            N3=sizes[3],
            BM=config.rows,
            BN=config.outputs,
            BR=RANK_BLOCK,
            BY_ROW=config.by_row,
            num_warps=config.warps,
            **pdl_options(h_TSR, T),
        )


@triton.jit
def _own_rows(slots_ptr, T, BM: tl.constexpr, BY_ROW: tl.constexpr):
    """Return (the tile's rows, mask of the rows of this block's adapter, the adapter's slot)."""
    owner = tl.program_id(2)
    row = tl.arange(0, BM)
    t = tl.program_id(0) * BM + row
    slots = tl.load(slots_ptr + t, mask=t < T, other=-1)
    own, slot = own_slot(slots, row, owner, BY_ROW)
    return t, own, slot


@triton.jit
def _has_to_wait(slot):
    """Return True if this block must wait for the previous kernel.

    A block with nothing to do exits and makes room for blocks of the next kernel, except block 0:
    if all exited, the grid could end before the previous kernel.
    """
    block = tl.program_id(0) + tl.program_id(1) + tl.program_id(2)
    return (slot >= 0) | (block == 0)


@triton.jit(do_not_specialize=["T"])
def _lora_shrink(
    x_ptr,
    slots_ptr,
    a_ptr,
    ranks_ptr,
    h_ptr,
    parts_ptr,
    counters_ptr,
    T,
    K,
    stride_x,
    stride_slot,
    stride_rank,
    stride_ranks,
    R,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    WARPS: tl.constexpr,
    ONE_STEP: tl.constexpr,
    BY_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(1)
    part, s, first = block % PARTS, block // PARTS % S, block // (PARTS * S) * BR
    t, own, slot = _own_rows(slots_ptr, T, BM, BY_ROW)
    rank = tl.load(ranks_ptr + slot * stride_ranks + s, mask=slot >= 0, other=0)
    j = first + tl.arange(0, BR)
    # with several warps, each has different inputs
    OWN: tl.constexpr = BK // WARPS
    warp = tl.arange(0, WARPS)[:, None, None]
    k = tl.arange(0, OWN)[None, None, :]
    steps = tl.cdiv(tl.cdiv(K, BK), PARTS)
    start = part * steps * BK + warp * OWN + k  # [WARPS, 1, OWN]
    end = tl.minimum(K, (part + 1) * steps * BK)
    # no kernel of the step writes A: it is copied to the device before the step's inputs
    a_ptrs = a_ptr + slot.to(tl.int64) * stride_slot + j.to(tl.int64)[None, :, None] * stride_rank
    a_ptrs += s * K
    in_rank = (j < rank)[None, :, None]
    a = tl.load(a_ptrs + start, mask=in_rank & (start < end), other=0.0)
    if PDL and _has_to_wait(slot):
        pdl_launch_and_wait()
    if rank > first:
        x_ptrs = x_ptr + t.to(tl.int64)[None, :, None] * stride_x
        own_rows = own[None, :, None]
        x = tl.load(x_ptrs + start, mask=own_rows & (start < end), other=0.0)
        total = tl.zeros((WARPS, BM, BR) if WARPS > 1 else (BM, BR), tl.float32)
        for step in tl.range(1, 2 if ONE_STEP else steps + 1):
            at = start + step * BK
            if not ONE_STEP:
                next_x = tl.load(x_ptrs + at, mask=own_rows & (at < end), other=0.0)
                next_a = tl.load(a_ptrs + at, mask=in_rank & (at < end), other=0.0)
            if WARPS > 1:
                total = tl.dot(x, tl.permute(a, (0, 2, 1)), total, input_precision="ieee")
            else:
                rows = tl.reshape(x, (BM, OWN))
                of_ranks = tl.reshape(a, (BR, OWN))
                total = tl.dot(rows, tl.trans(of_ranks), total, input_precision="ieee")
            if not ONE_STEP:
                x, a = next_x, next_a
        if WARPS > 1:
            total = tl.sum(total, 0)
        place = ((t.to(tl.int64) * S + s) * R)[:, None] + j[None, :]
        mask = own[:, None] & (j < R)[None, :]
        tl.store(parts_ptr + part * T.to(tl.int64) * S * R + place, total, mask=mask)
        if counters_ptr is not None:
            # every thread's sums are stored before one thread increments the counter
            tl.debug_barrier()
            group = (tl.program_id(0) * (tl.num_programs(1) // PARTS) + block // PARTS).to(tl.int32)
            counter_ptr = counters_ptr + group * tl.num_programs(2) + tl.program_id(2)
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == PARTS - 1:
                tl.debug_barrier()
                total = tl.zeros((BM, BR), tl.float32)
                for i in tl.static_range(PARTS):
                    # .cg: other blocks of the same kernel have written these
                    total += tl.load(
                        parts_ptr + i * T.to(tl.int64) * S * R + place,
                        mask=mask,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                tl.store(h_ptr + place, total, mask=mask)
                tl.store(counter_ptr, 0)


@triton.jit
def _of_linear(s, value0, value1, value2, value3):
    """Return the value of linear s."""
    return tl.where(s == 0, value0, tl.where(s == 1, value1, tl.where(s == 2, value2, value3)))


@triton.jit(do_not_specialize=["T"])
def _lora_expand(
    y_ptr,
    h_ptr,
    slots_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    T,
    stride_y,
    stride_slot,
    stride_rank,
    stride_ranks,
    stride_scales,
    R,
    S: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BY_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(1)
    TILES0: tl.constexpr = (N0 + BN - 1) // BN
    TILES1: tl.constexpr = TILES0 + (N1 + BN - 1) // BN
    TILES2: tl.constexpr = TILES1 + (N2 + BN - 1) // BN
    # no tile reaches from one of the linears into the next
    s = (block >= TILES0).to(tl.int32) + (block >= TILES1).to(tl.int32)
    s += (block >= TILES2).to(tl.int32)
    first = _of_linear(s, 0, TILES0, TILES1, TILES2)
    before = _of_linear(s, 0, N0, N0 + N1, N0 + N1 + N2)
    end = before + _of_linear(s, N0, N1, N2, N3)
    n = before + (block - first) * BN + tl.arange(0, BN)
    t, own, slot = _own_rows(slots_ptr, T, BM, BY_ROW)
    rank = tl.load(ranks_ptr + slot * stride_ranks + s, mask=slot >= 0, other=0)
    scale = tl.load(scales_ptr + slot * stride_scales + s, mask=slot >= 0, other=0.0)
    j = tl.arange(0, BR)
    b_ptrs = b_ptr + slot.to(tl.int64) * stride_slot + j.to(tl.int64)[:, None] * stride_rank
    b_ptrs += n[None, :]
    inside = (n < end)[None, :]
    b = tl.load(b_ptrs, mask=(j < rank)[:, None] & inside, other=0.0)
    if PDL:
        pdl_launch_and_wait()
    if rank > 0:
        y_ptrs = y_ptr + t.to(tl.int64)[:, None] * stride_y + n[None, :]
        mask = own[:, None] & inside
        y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
        h_ptrs = h_ptr + ((t.to(tl.int64) * S + s) * R)[:, None] + j[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        for at in tl.range(0, rank, BR):
            h = tl.load(h_ptrs + at, mask=own[:, None] & (at + j < rank)[None, :], other=0.0)
            total = tl.dot(h.to(b.dtype), b, total, input_precision="ieee")
            b_ptrs += BR * stride_rank
            b = tl.load(b_ptrs, mask=(at + BR + j < rank)[:, None] & inside, other=0.0)
        tl.store(y_ptrs, (y + scale * total).to(y_ptr.dtype.element_ty), mask=mask)
