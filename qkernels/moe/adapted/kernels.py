"""LoRA of experts in Triton: A x of each pair, then scale * B h added to the pair's product.

A pair is a token and one of its experts. A block has the pairs of one expert and one adapter in a
tile of pairs. The activation runs in a kernel of its own, because it follows the sum.
Legend: see weights.py; P pairs, I inner size; BM pairs of a tile, BK, BN, BR its other sizes.
"""

import triton
import triton.language as tl

from qkernels.gpu.pdl import pdl_launch_and_wait
from qkernels.lora.own_rows import own_slot
from qkernels.moe.stack import PAIR_ROWS
from qkernels.moe.tiles_triton import activated, find_pairs, squared

GATE_ROWS = tl.constexpr(PAIR_ROWS)


@triton.jit
def _own_pairs(
    ids_ptr,
    sorted_ptr,
    counts_ptr,
    slots_ptr,
    P,
    E,
    BM: tl.constexpr,
    BY_ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return (expert, pairs [BM], mask of the pairs of this block's adapter, the adapter's slot).

    Slot -1: the block has nothing to do.
    """
    block, owner = tl.program_id(0), tl.program_id(2)
    expert, pair, valid = find_pairs(ids_ptr, sorted_ptr, counts_ptr, block, P, E, BM, TILE)
    slots = tl.load(slots_ptr + pair // TILE.top_k, mask=valid, other=-1)
    own, slot = own_slot(slots, tl.arange(0, BM), owner, BY_ROW)
    return expert, pair, own, slot


@triton.jit(do_not_specialize=["P"])
def shrink_pairs(
    x_ptr,  # [rows, K]
    slots_ptr,  # [M]
    a_ptr,
    ranks_ptr,
    ids_ptr,  # [P]
    sorted_ptr,  # [P], or None if there are few ids
    counts_ptr,  # [E], or None
    h_ptr,  # float32 [P, S, R]
    P,
    K,
    E,
    R,
    stride_slot,
    stride_rank,
    stride_ranks,
    S: tl.constexpr,
    ROW_PAIRS: tl.constexpr,  # pairs that share a row of x
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BY_ROW: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_launch_and_wait()
    s, first = tl.program_id(1) % S, tl.program_id(1) // S * BR
    expert, pair, own, slot = _own_pairs(
        ids_ptr, sorted_ptr, counts_ptr, slots_ptr, P, E, BM, BY_ROW, TILE
    )
    rank = tl.load(ranks_ptr + slot * stride_ranks + s, mask=slot >= 0, other=0)
    if rank > first:
        j, k = first + tl.arange(0, BR), tl.arange(0, BK)
        x_ptrs = x_ptr + (pair // ROW_PAIRS).to(tl.int64)[:, None] * K + k[None, :]
        a_ptrs = a_ptr + slot.to(tl.int64) * stride_slot + j.to(tl.int64)[:, None] * stride_rank
        a_ptrs += (expert.to(tl.int64) * S + s) * K + k[None, :]
        in_rank = (j < rank)[:, None]
        total = tl.zeros((BM, BR), tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            inside = (start + k < K)[None, :]
            x = tl.load(x_ptrs + start, mask=own[:, None] & inside, other=0.0)
            a = tl.load(a_ptrs + start, mask=in_rank & inside, other=0.0)
            total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
        h_ptrs = h_ptr + ((pair.to(tl.int64) * S + s) * R)[:, None] + j[None, :]
        tl.store(h_ptrs, total, mask=own[:, None] & (j < R)[None, :])


@triton.jit(do_not_specialize=["P"])
def expand_pairs(
    y_ptr,  # [P, S SIZE]
    h_ptr,  # float32 [P, S, R]
    slots_ptr,  # [M]
    b_ptr,
    ranks_ptr,
    scales_ptr,
    ids_ptr,  # [P]
    sorted_ptr,  # [P], or None if there are few ids
    counts_ptr,  # [E], or None
    weights_ptr,  # [P]
    P,
    E,
    R,
    stride_slot,
    stride_rank,
    stride_ranks,
    stride_scales,
    S: tl.constexpr,
    SIZE: tl.constexpr,  # outputs of one linear
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BY_ROW: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the term to y. The outputs of two linears alternate, as in the stack of weights."""
    if PDL:
        pdl_launch_and_wait()
    TILES: tl.constexpr = (SIZE + BN - 1) // BN
    s, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    expert, pair, own, slot = _own_pairs(
        ids_ptr, sorted_ptr, counts_ptr, slots_ptr, P, E, BM, BY_ROW, TILE
    )
    rank = tl.load(ranks_ptr + slot * stride_ranks + s, mask=slot >= 0, other=0)
    if rank > 0:
        scale = tl.load(scales_ptr + slot * stride_scales + s)
        j, n = tl.arange(0, BR), tile * BN + tl.arange(0, BN)
        inside = (n < SIZE)[None, :]
        b_ptrs = b_ptr + slot.to(tl.int64) * stride_slot + j.to(tl.int64)[:, None] * stride_rank
        b_ptrs += (expert.to(tl.int64) * S + s) * SIZE + n[None, :]
        h_ptrs = h_ptr + ((pair.to(tl.int64) * S + s) * R)[:, None] + j[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        for at in tl.range(0, rank, BR):
            h = tl.load(h_ptrs + at, mask=own[:, None] & (at + j < rank)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(at + j < rank)[:, None] & inside, other=0.0)
            total = tl.dot(h.to(b.dtype), b, total, input_precision="ieee")
            b_ptrs += BR * stride_rank
        total *= scale
        if TILE.weighted:
            total *= tl.load(weights_ptr + pair, mask=own, other=0.0)[:, None]
        column = n
        if S == 2:
            column = n // GATE_ROWS * (2 * GATE_ROWS) + s * GATE_ROWS + n % GATE_ROWS
        y_ptrs = y_ptr + pair.to(tl.int64)[:, None] * (S * SIZE) + column[None, :]
        mask = own[:, None] & inside
        y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptrs, (y + total).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def activate_pairs(
    y_ptr,  # [P, N]
    hidden_ptr,  # [P, I]
    I,  # noqa: E741
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the activated products: of gate and up, which alternate, or of up."""
    if PDL:
        pdl_launch_and_wait()
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    pair = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    if TILE.glu:
        column = i // GATE_ROWS * (2 * GATE_ROWS) + i % GATE_ROWS
        y_ptrs = y_ptr + pair * (2 * I) + column
        gate = tl.load(y_ptrs, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(y_ptrs + GATE_ROWS, mask=inside, other=0.0).to(tl.float32)
        hidden = activated(gate, up, DTYPE, TILE)
    else:
        hidden = squared(tl.load(y_ptr + pair * I + i, mask=inside, other=0.0).to(tl.float32))
    tl.store(hidden_ptr + pair * I + i, hidden.to(DTYPE), mask=inside)
