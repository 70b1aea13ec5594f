"""Triton device functions of the expert products: a block's expert and pairs, and its output rows.

A pair p = m k + j is token m and its j-th expert. Legend: M tokens, E experts, k experts per token,
P = M k pairs; BM pairs of a block, BN outputs of a tile.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsTile:
    """Compile-time constants of the product kernels."""

    top_k: int
    # a block finds its pairs in the ids of all pairs, padded to this number; 0: pairs are sorted
    pairs: int
    experts: int  # power of two, at least E
    glu: bool = False  # the outputs are gate and up; the activation halves their number
    gelu: bool = False  # gelu(gate) instead of gate * sigmoid(alpha * gate)
    alpha: float = 1.0
    offset: float = 0.0
    limit: float = 0.0  # 0: none
    cut_after: bool = False  # the activation's result is cut above limit, not gate
    relu2: bool = False  # the square of ReLU is applied to the outputs
    parts: bool = False  # store weighted float32 partial sums for the consumer: [split, k, M, N]
    partial: bool = False  # other ranks hold some of the experts
    weighted: bool = False  # multiply by the pair's routing weight


@triton.jit
def find_pairs(ids_ptr, sorted_ptr, counts_ptr, block, P, E, BM: tl.constexpr, TILE: tl.constexpr):
    """Return a block's (expert, pairs [BM], mask of valid pairs). All False: nothing to do.

    Pairs of experts of other ranks belong to no block.
    """
    r = tl.arange(0, BM)
    if TILE.pairs > 0:
        # Block number b belongs to pair b. The block of an expert's first pair computes all pairs
        # of the expert: at most BM, because a token's experts are distinct.
        p = tl.arange(0, TILE.pairs)
        ids = tl.load(ids_ptr + p, mask=p < P, other=-1)
        expert = tl.load(ids_ptr + block)
        same = ids == expert
        first = tl.min(tl.where(same, p, TILE.pairs), 0)
        rank = tl.cumsum(same.to(tl.int32), 0) - 1
        hit = same[None, :] & (rank[None, :] == r[:, None])
        pair = tl.sum(tl.where(hit, p[None, :], 0), 1)
        count = tl.where((first == block) & (expert < E), tl.sum(same.to(tl.int32), 0), 0)
        valid = r < count
    else:
        e = tl.arange(0, TILE.experts)
        counts = tl.load(counts_ptr + e, mask=e < E, other=0)
        blocks = (counts + BM - 1) // BM
        expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
        inside = block - tl.sum(tl.where(e < expert, blocks, 0), 0)
        start = tl.sum(tl.where(e < expert, counts, 0), 0)
        count = tl.sum(tl.where(e == expert, counts, 0), 0)
        valid = inside * BM + r < count
        pair = tl.load(sorted_ptr + start + inside * BM + r, mask=valid, other=0)
    return expert, pair, valid


@triton.jit
def clear_part(ids_ptr, y_ptr, block, tile_n, split, P, N, E, BN: tl.constexpr, TILE: tl.constexpr):
    """Write zeros for the pair with the block's number if its expert is on another rank.

    Only kernels whose blocks search the ids of all pairs (TILE.pairs > 0) write parts.
    """
    if tl.load(ids_ptr + block) >= E:
        n = tile_n * BN + tl.arange(0, BN)
        row = (split * TILE.top_k + block % TILE.top_k) * (P // TILE.top_k) + block // TILE.top_k
        zeros = tl.zeros((BN,), y_ptr.dtype.element_ty)
        tl.store(y_ptr + row.to(tl.int64) * N + n, zeros)


@triton.jit
def activated(gate, up, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Return the activated gate times up, float32, for rounded products gate and up.

    Rounds the activation to DTYPE, as torch does.
    """
    if TILE.limit > 0:
        if not TILE.cut_after:
            gate = tl.minimum(gate, TILE.limit)
        up = tl.minimum(tl.maximum(up, -TILE.limit), TILE.limit)
    argument = TILE.alpha * gate
    if TILE.gelu:
        # 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y)), y = sqrt(2 / pi) (gate + 0.044715 gate^3)
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    act = (gate / (1 + tl.exp(-argument))).to(DTYPE).to(tl.float32)
    if TILE.cut_after:
        act = tl.where(act > TILE.limit, TILE.limit, act)  # propagates NaN
    return act * (up + TILE.offset)


@triton.jit
def squared(x):
    """Return the square of ReLU. Propagates NaN."""
    positive = tl.where(x < 0, 0.0, x)
    return positive * positive


@triton.jit
def store_pairs(
    sums,  # float32 [BN, BM]
    y_ptr,
    weights_ptr,
    pair,
    valid,
    tile_n,
    split,
    P,
    N,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store a block's results.

    With a gate: activated gate times up, to [P, N / 2]. Otherwise the outputs, activated or not, to
    [P, N] or to parts [split k, M, N].
    """
    if TILE.glu:
        # rounds where torch rounds: the product, the activation, and their product
        rounded = sums.to(DTYPE).to(tl.float32).reshape(BN // 16, 2, 8, BM).trans(0, 2, 3, 1)
        gate, up = tl.split(rounded)
        y = activated(gate, up, DTYPE, TILE).reshape(BN // 2, BM)
        n = tile_n * (BN // 2) + tl.arange(0, BN // 2)
        y_ptrs = y_ptr + pair.to(tl.int64)[None, :] * (N // 2) + n[:, None]
        tl.store(y_ptrs, y.to(DTYPE), mask=valid[None, :])
    else:
        if TILE.relu2:
            # rounds the product as torch does; the square is rounded when it is stored
            sums = squared(sums.to(DTYPE).to(tl.float32))
        if TILE.weighted:
            share = tl.load(weights_ptr + pair, mask=valid, other=0.0)
            sums = sums * share[None, :]
        n = tile_n * BN + tl.arange(0, BN)
        if TILE.parts:
            M = P // TILE.top_k
            row = (split * TILE.top_k + pair % TILE.top_k) * M + pair // TILE.top_k
        else:
            row = pair
        y_ptrs = y_ptr + row.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(y_ptrs, sums.to(y_ptr.dtype.element_ty), mask=valid[None, :])
