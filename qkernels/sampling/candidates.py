"""Device functions that find the values of a row that may be drawn, without a sort.

A search finds a float's bits, four at a time: it counts the values above each of 16 pivots, or adds
their probabilities. If there are few candidates, all pairs of them are compared instead.

Legend: V vocabulary, G groups. Candidates are lists of values and tokens in token order, so among
equal values the first one in the list ranks higher.
"""

import triton
import triton.language as tl

from qkernels.sampling.logits import adjust, noise, order, weight

GROUP = 64  # tokens per group; the first kernel keeps a group's largest value
TILE = 512  # values that a search reads together
COLLECT_GROUPS = 32  # groups that are read again together
FEW = 128  # up to this many candidates are ranked by comparing all pairs
ROWS = 16  # candidates that are compared with all others at a time
_GROUP, _TILE = tl.constexpr(GROUP), tl.constexpr(TILE)
_COLLECT_GROUPS = tl.constexpr(COLLECT_GROUPS)
_FEW, _ROWS = tl.constexpr(FEW), tl.constexpr(ROWS)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def search(values_ptr, n, target, largest, by_mass, ROUNDS: tl.constexpr):
    """Return the largest order t for which the values of order t or above reach `target`.

    Each value counts as 1, or as its weight if `by_mass`. t is 0 if all values together do not
    reach it. With fewer than 8 ROUNDS the low bits of t stay 0, so t may be too low, by less than
    2^(32 - 4 ROUNDS).
    """
    pivot = tl.arange(0, 16)
    found = tl.full([], 0, tl.uint32)
    for i in range(ROUNDS):
        pivots = found + (pivot.to(tl.uint32) << (28 - 4 * i))
        # reduced over the block once per round, not once per tile
        sums = tl.zeros([16, _TILE], tl.float32)
        for first in range(0, n, _TILE):
            index = first + tl.arange(0, _TILE)
            x = tl.load(values_ptr + index, mask=index < n, other=float("-inf"))
            weights = tl.where(by_mass, weight(x, largest), 1.0)
            weights = tl.where(index < n, weights, 0.0)
            above = order(x)[None, :] >= pivots[:, None]
            sums += tl.where(above, weights[None, :], 0.0)
        totals = tl.sum(sums, 1)
        # totals fall from pivot to pivot; the first pivot is known to reach the target
        limb = tl.sum(((totals >= target) & (pivot > 0)).to(tl.int32))
        found += limb.to(tl.uint32) << (28 - 4 * i)
    return found


@triton.jit
def cut(values_ptr, n, target, largest, by_mass):
    """Find the likeliest values that together reach `target`, by number or by weight (`by_mass`).

    Returns (t, ties): the values above order t, and the first `ties` of the values of order t.
    """
    t = search(values_ptr, n, target, largest, by_mass, 8)
    above = 0.0
    each = 0.0
    for first in range(0, n, _TILE):
        index = first + tl.arange(0, _TILE)
        x = tl.load(values_ptr + index, mask=index < n, other=float("-inf"))
        bits = tl.where(index < n, order(x), 0)
        weights = tl.where(by_mass, weight(x, largest), 1.0)
        above += tl.sum(tl.where(bits > t, weights, 0.0))
        each = tl.maximum(each, tl.max(tl.where(bits == t, weights, 0.0)))
    ties = tl.ceil((target - above) / tl.maximum(each, 1e-37))
    return t, ties


@triton.jit
def mass_of(values_ptr, n, t, ties, largest):
    """Return the total weight of the values that `cut` selects."""
    above = 0.0
    each = 0.0
    count = 0.0
    for first in range(0, n, _TILE):
        index = first + tl.arange(0, _TILE)
        x = tl.load(values_ptr + index, mask=index < n, other=float("-inf"))
        bits = tl.where(index < n, order(x), 0)
        weights = weight(x, largest)
        above += tl.sum(tl.where(bits > t, weights, 0.0))
        tie = (bits == t) & (index < n)
        each = tl.maximum(each, tl.max(tl.where(tie, weights, 0.0)))
        count += tl.sum(tie.to(tl.float32))
    return above + tl.minimum(count, ties) * each


@triton.jit
def collect(
    t,
    logits_ptr,
    settings,
    bias_ptr,
    history_ptr,
    group_max_ptr,
    group_list_ptr,
    values_ptr,
    tokens_ptr,
    V,
    G,
    ADJUSTED: tl.constexpr,
):
    """Write the values of order t or above, and their tokens, sorted by token. Return their number.

    Ends with a barrier, so that all threads of the block see the writes.
    """
    # other threads may still read the previous list
    tl.debug_barrier()
    num_groups = 0
    for first in range(0, G, _TILE):
        group = first + tl.arange(0, _TILE)
        x = tl.load(group_max_ptr + group, mask=group < G, other=float("-inf"))
        chosen = ((order(x) >= t) & (group < G)).to(tl.int32)
        place = num_groups + tl.cumsum(chosen, 0) - 1
        tl.store(group_list_ptr + place, group, mask=chosen > 0)
        num_groups += tl.sum(chosen)
    tl.debug_barrier()
    n = 0
    for first in range(0, num_groups, _COLLECT_GROUPS):
        index = first + tl.arange(0, _COLLECT_GROUPS)
        group = tl.load(group_list_ptr + index, mask=index < num_groups, other=0)
        token = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        valid = (token < V) & (index < num_groups)[:, None]
        x = tl.load(logits_ptr + token, mask=valid, other=float("-inf")).to(tl.float32)
        if ADJUSTED:
            x = adjust(x, token, valid, settings, bias_ptr, history_ptr, V)
        flat = tl.reshape(x, [_COLLECT_GROUPS * _GROUP])
        chosen = tl.reshape((valid & (order(x) >= t)).to(tl.int32), [_COLLECT_GROUPS * _GROUP])
        place = n + tl.cumsum(chosen, 0) - 1
        tl.store(values_ptr + place, flat, mask=chosen > 0)
        tl.store(tokens_ptr + place, tl.reshape(token, [_COLLECT_GROUPS * _GROUP]), mask=chosen > 0)
        n += tl.sum(chosen)
    tl.debug_barrier()
    return n


@triton.jit
def is_before(values_ptr, first, n):
    """Return True where value j of n is likelier than value first + i: [ROWS, FEW]."""
    i, j = first + tl.arange(0, _ROWS)[:, None], tl.arange(0, _FEW)[None, :]
    one = order(tl.load(values_ptr + i, mask=i < n, other=0.0))
    other = order(tl.load(values_ptr + j, mask=j < n, other=0.0))
    return (j < n) & ((other > one) | ((other == one) & (j < i)))


@triton.jit
def draw_few(
    values_ptr,
    tokens_ptr,
    n,
    top_k,
    top_p,
    mass,
    only_top_p,
    largest,
    key,
    INTERPRETED: tl.constexpr,
):
    """Draw a token from n candidates by comparing each pair of candidates."""
    j = tl.arange(0, _FEW)
    weights = weight(tl.load(values_ptr + j, mask=j < n, other=float("-inf")), largest)
    limit = tl.where(top_k > 0, top_k, 1.0 * _FEW)
    if not only_top_p:
        mass = 0.0
        for first in range(0, n, _ROWS):
            i = first + tl.arange(0, _ROWS)
            rank = tl.sum(is_before(values_ptr, first, n).to(tl.float32), 1)
            x = tl.load(values_ptr + i, mask=i < n, other=float("-inf"))
            mass += tl.sum(tl.where((i < n) & (rank < limit), weight(x, largest), 0.0))
    enough = tl.where(top_p < 1, top_p * mass, float("inf"))
    best = float("-inf")
    drawn = tl.full([], NO_TOKEN, tl.int32)
    for first in range(0, n, _ROWS):
        i = first + tl.arange(0, _ROWS)
        before = is_before(values_ptr, first, n)
        rank = tl.sum(before.to(tl.float32), 1)
        weight_before = tl.sum(tl.where(before, weights[None, :], 0.0), 1)
        kept = (i < n) & (rank < limit) & (weight_before < enough)
        x = tl.load(values_ptr + i, mask=i < n, other=float("-inf"))
        token = tl.load(tokens_ptr + i, mask=i < n, other=NO_TOKEN)
        best, drawn = better(x, token, kept, best, drawn, key, INTERPRETED)
    return drawn


@triton.jit
def better(x, token, kept, best, drawn, key, INTERPRETED: tl.constexpr):
    """Update the best score and its token with these values; ties go to the lowest token."""
    score = tl.where(kept, x + noise(token, key, INTERPRETED), float("-inf"))
    tile_best = tl.max(score)
    tile_token = tl.min(tl.where(kept & (score == tile_best), token, NO_TOKEN))
    wins = (tile_best > best) | (drawn == NO_TOKEN)
    return tl.where(wins, tile_best, best), tl.where(wins, tile_token, drawn)


@triton.jit
def draw_many(
    values_ptr,
    tokens_ptr,
    n,
    top_k,
    top_p,
    mass,
    only_top_p,
    largest,
    key,
    INTERPRETED: tl.constexpr,
):
    """Draw a token from many candidates: find the filters' limits, then scan once more."""
    t = tl.full([], 0, tl.uint32)
    ties = 0.0
    if (top_k > 0) & (top_k < n):
        t, ties = cut(values_ptr, n, top_k, largest, False)
    if top_p < 1:
        if not only_top_p:
            mass = mass_of(values_ptr, n, t, ties, largest)
        t, ties = cut(values_ptr, n, top_p * mass, largest, True)
    best = float("-inf")
    drawn = tl.full([], NO_TOKEN, tl.int32)
    num_ties = 0
    for first in range(0, n, _TILE):
        index = first + tl.arange(0, _TILE)
        x = tl.load(values_ptr + index, mask=index < n, other=float("-inf"))
        token = tl.load(tokens_ptr + index, mask=index < n, other=NO_TOKEN)
        bits = tl.where(index < n, order(x), 0)
        tie = ((bits == t) & (index < n)).to(tl.int32)
        rank = num_ties + tl.cumsum(tie, 0) - tie
        kept = (bits > t) | ((tie > 0) & (rank < ties))
        num_ties += tl.sum(tie)
        best, drawn = better(x, token, kept, best, drawn, key, INTERPRETED)
    return drawn


@triton.jit
def store_few(values_ptr, tokens_ptr, n, count, log_total, out_tokens_ptr, out_logprobs_ptr):
    """Write the likeliest `count` of n candidates, in order, by comparing each pair."""
    for first in range(0, n, _ROWS):
        i = first + tl.arange(0, _ROWS)
        rank = tl.sum(is_before(values_ptr, first, n).to(tl.int32), 1)
        x = tl.load(values_ptr + i, mask=i < n, other=0.0)
        token = tl.load(tokens_ptr + i, mask=i < n, other=0)
        stored = (i < n) & (rank < count)
        tl.store(out_tokens_ptr + rank, token.to(tl.int64), mask=stored)
        tl.store(out_logprobs_ptr + rank, x - log_total, mask=stored)


@triton.jit
def store_many(values_ptr, tokens_ptr, n, count, log_total, out_tokens_ptr, out_logprobs_ptr):
    """Write the likeliest `count` of n candidates, in order, with one scan for each."""
    last = float("inf")
    last_token = -1
    for i in range(0, count):
        best = float("-inf")
        best_token = tl.full([], NO_TOKEN, tl.int32)
        for first in range(0, n, _TILE):
            index = first + tl.arange(0, _TILE)
            x = tl.load(values_ptr + index, mask=index < n, other=float("-inf"))
            token = tl.load(tokens_ptr + index, mask=index < n, other=NO_TOKEN)
            after = (index < n) & ((x < last) | ((x == last) & (token > last_token)))
            tile_best = tl.max(tl.where(after, x, float("-inf")))
            tile_token = tl.min(tl.where(after & (x == tile_best), token, NO_TOKEN))
            better = (tile_best > best) | (best_token == NO_TOKEN)
            best_token = tl.where(better, tile_token, best_token)
            best = tl.where(better, tile_best, best)
        tl.store(out_tokens_ptr + i, best_token.to(tl.int64))
        tl.store(out_logprobs_ptr + i, best - log_total)
        last = best
        last_token = best_token
