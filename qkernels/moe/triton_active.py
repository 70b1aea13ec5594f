"""List the active experts, and sort their pairs, for blocks that go from one expert to the next.

Pairs of experts of other ranks (id E) are in no list. If the next norm adds partial sums, their
partial sums are zeroed here. Legend: M tokens, E experts, k experts per token, P = M k pairs, C
hidden size; BM columns of a tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.moe.routing import Routes

COLUMNS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActiveExperts:
    """The active experts, which at least one token chose, in ascending order.

    `list` has one of three forms; E' is `most`:

    - one token, all experts on this rank: the token's choice, [k];
    - otherwise, without `order`: int32 [1 + E'], the number of active experts, then the experts;
    - with `order`: int32 [1 + 3 E'], the number of entries, then for all entries the experts, the
      first of their sorted pairs, and their numbers of pairs. An expert with more than BM pairs has
      several entries.

    Elements after the last entry are unspecified.
    """

    list: torch.Tensor
    most: int  # largest possible number of experts or entries
    counted: bool = True  # the list begins with the number of entries
    order: torch.Tensor | None = None  # [P] pairs, sorted by expert
    weights: torch.Tensor | None = None  # [P] routing weights of the sorted pairs
    x_PC: torch.Tensor | None = None  # rows of x of the sorted pairs


def active_experts(
    ids_Mk: torch.Tensor,
    num_experts: int,
    is_partial: bool = False,
    parts: torch.Tensor | None = None,
) -> ActiveExperts:
    """List the active experts without sorting: every token is a column of each expert.

    `is_partial`: other ranks hold some experts; their partial sums in `parts` [split k, M, C] are
    zeroed, if it is given.
    """
    M, P = ids_Mk.shape[0], ids_Mk.numel()
    most = min(num_experts, P)
    if M == 1 and not is_partial:
        return ActiveExperts(list=ids_Mk.view(-1), most=most, counted=False)
    active = torch.empty(1 + most, dtype=torch.int32, device=ids_Mk.device)
    columns = 1 if parts is None else parts.shape[2]
    with on_device(ids_Mk):
        launch(
            _active_experts,
            (1 if parts is None else 1 + P,),
            ids_Mk,
            active,
            parts,
            P,
            num_experts,
            columns,
            TOP_K=ids_Mk.shape[1],
            SPLIT=0 if parts is None else parts.shape[0] // ids_Mk.shape[1],
            SLOTS=_slots(num_experts),
            PAIRS=max(128, power_of_two(P)),
            BLOCK=min(COLUMNS_AT_ONCE, power_of_two(columns)),
            num_warps=4,
            **pdl_options(ids_Mk, 1),
        )
    return ActiveExperts(list=active, most=most)


def active_pairs(
    x_MC: torch.Tensor,
    routes: Routes,
    num_experts: int,
    block_m: int,
    parts: torch.Tensor | None = None,
) -> ActiveExperts:
    """Sort the pairs, up to `block_m` per entry, and gather their rows of x.

    If `parts` [split k, M, C] is given, the partial sums of experts of other ranks are zeroed.
    """
    ids_Mk, weights_Mk = routes
    P, C = ids_Mk.numel(), x_MC.shape[1]
    most = (P + min(num_experts, P) * (block_m - 1)) // block_m
    device = x_MC.device
    active = torch.empty(1 + 3 * most, dtype=torch.int32, device=device)
    order = torch.empty(P, dtype=torch.int32, device=device)
    weights = torch.empty(P, dtype=torch.float32, device=device)
    x_PC = x_MC.new_empty(P, C)
    with on_device(x_MC):
        launch(
            _pairs_of_experts,
            (1 + P,),
            x_MC,
            ids_Mk,
            weights_Mk,
            active,
            order,
            weights,
            x_PC,
            parts,
            P,
            C,
            most,
            num_experts,
            TOP_K=ids_Mk.shape[1],
            SPLIT=0 if parts is None else parts.shape[0] // ids_Mk.shape[1],
            SLOTS=_slots(num_experts),
            PAIRS=max(128, power_of_two(P)),
            BM=block_m,
            BLOCK=min(COLUMNS_AT_ONCE, power_of_two(C)),
            num_warps=4,
            **pdl_options(x_MC, 1),
        )
    return ActiveExperts(list=active, most=most, order=order, weights=weights, x_PC=x_PC)


def _slots(num_experts: int) -> int:
    """Return the number of counters in a block: at least one per thread of a warp."""
    return max(32, power_of_two(num_experts))


@triton.jit
def _count(ids_ptr, P, E, SLOTS: tl.constexpr, PAIRS: tl.constexpr):
    """Count the pairs of each expert: [SLOTS]."""
    p = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + p, mask=p < P, other=1 << 30)
    here = ids < E
    counts = tl.histogram(tl.where(here, ids, 0), SLOTS)
    return counts - tl.where(tl.arange(0, SLOTS) == 0, PAIRS - tl.sum(here.to(tl.int32), 0), 0)


@triton.jit
def _clear(
    ids_ptr,
    parts_ptr,
    pair,
    P,
    E,
    C,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write zeros to a pair's rows of [SPLIT TOP_K, M, C] if its expert is on another rank."""
    if tl.load(ids_ptr + pair) >= E:
        zeros = tl.zeros((BLOCK,), parts_ptr.dtype.element_ty)
        for split in tl.static_range(SPLIT):
            row = (split * TOP_K + pair % TOP_K) * (P // TOP_K) + pair // TOP_K
            for start in tl.range(0, C, BLOCK):
                c = start + tl.arange(0, BLOCK)
                tl.store(parts_ptr + row.to(tl.int64) * C + c, zeros, mask=c < C)


@triton.jit(do_not_specialize=["P", "E"])
def _active_experts(
    ids_ptr,  # [P]
    active_ptr,  # [1 + E']
    parts_ptr,  # [SPLIT TOP_K, M, C], or None: none are cleared
    P,
    E,
    C,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the active experts in the first block; clear the parts of a pair in each other block."""
    if PDL:
        pdl_launch_and_wait()
    pair = tl.program_id(0) - 1
    if pair < 0:
        found = (_count(ids_ptr, P, E, SLOTS, PAIRS) > 0).to(tl.int32)
        tl.store(active_ptr + tl.cumsum(found, 0), tl.arange(0, SLOTS), mask=found > 0)
        tl.store(active_ptr, tl.sum(found, 0))
    elif parts_ptr is not None:
        _clear(ids_ptr, parts_ptr, pair, P, E, C, TOP_K, SPLIT, BLOCK)


@triton.jit(do_not_specialize=["P", "most", "E"])
def _pairs_of_experts(
    x_ptr,  # [M, C]
    ids_ptr,  # [P]
    weights_ptr,  # [P]
    active_ptr,  # [1 + 3 E']
    order_ptr,  # [P]
    sorted_shares_ptr,  # [P]
    sorted_ptr,  # [P, C]
    parts_ptr,  # [SPLIT TOP_K, M, C], or None: none are cleared
    P,
    C,
    most,  # E'
    E,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the entries in the first block; put one pair into its place in each other block.

    If the pair's expert is on another rank, the block clears the pair's parts instead.
    """
    if PDL:
        pdl_launch_and_wait()
    pair = tl.program_id(0) - 1
    if pair < 0:
        counts = _count(ids_ptr, P, E, SLOTS, PAIRS)
        entries = (counts + BM - 1) // BM
        first_entry = tl.cumsum(entries, 0) - entries
        first_pair = tl.cumsum(counts, 0) - counts
        e = tl.arange(0, SLOTS)
        for i in tl.range(0, tl.max(entries)):
            ptrs = active_ptr + 1 + first_entry + i
            tl.store(ptrs, e, mask=i < entries)
            tl.store(ptrs + most, first_pair + i * BM, mask=i < entries)
            tl.store(ptrs + 2 * most, tl.minimum(counts - i * BM, BM), mask=i < entries)
        tl.store(active_ptr, tl.sum(entries, 0))
    else:
        p = tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + p, mask=p < P, other=1 << 30)
        expert = tl.load(ids_ptr + pair)
        if expert < E:
            before = (ids < expert) | ((ids == expert) & (p < pair))
            place = tl.sum(before.to(tl.int32), 0)
            tl.store(order_ptr + place, pair)
            tl.store(sorted_shares_ptr + place, tl.load(weights_ptr + pair))
            row_ptr = x_ptr + (pair // TOP_K).to(tl.int64) * C
            for start in tl.range(0, C, BLOCK):
                c = start + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + c, mask=c < C)
                tl.store(sorted_ptr + place.to(tl.int64) * C + c, x, mask=c < C)
        elif parts_ptr is not None:
            _clear(ids_ptr, parts_ptr, pair, P, E, C, TOP_K, SPLIT, BLOCK)
