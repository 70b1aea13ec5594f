"""From logits to tokens in two Triton kernels, without a sort. Knows no request.

The first kernel reads each row once, in chunks on as many SMs as there are: the best token of rows
without a filter, sums for log probabilities, and the largest value of every group of 64 tokens. In
the second one block finishes each row. The k-th largest of the groups' maxima is at most the row's
k-th largest value, so a search over the maxima gives a bound, the few groups that reach it are read
again, and what they hold above the bound is searched exactly. Both searches find a float's bits,
four at a time, by counting (or adding the probabilities of) what lies above each of 16 pivots.

Legend: S rows, V vocabulary, W rows of the history table, N alternatives, G groups, C chunks.
"""

import torch
import triton
import triton.language as tl

from qkernels.launch import INTERPRETED, on_device
from qkernels.reference_sampling import MIN_TEMPERATURE
from qkernels.sample_settings import (
    BIAS_END,
    BIAS_START,
    INVALID_TOKEN,
    NUM_WORDS,
    NUMBERS,
    Samples,
    SampleSettings,
)
from qkernels.tiles import ceil_div, power_of_two

if not INTERPRETED:
    from triton.language.extra import libdevice
else:
    libdevice = None  # the interpreter's log is exact, and it knows no library

GROUP = 64  # tokens whose largest value is kept
GROUPS = 64  # groups of a chunk
CHUNK = GROUP * GROUPS
TILE = 1024  # values that a search reads at once
COLLECTED = 16  # groups that are read again at once

# Rows of the first kernel's results for each chunk.
_CHUNK_FLOATS = 5  # raw largest, raw sum, largest, sum, best score
_CHUNK_INTS = 2  # whether there is NaN, best token


def sample_(
    logits_SV: torch.Tensor, settings: SampleSettings, history_WV: torch.Tensor | None = None
) -> Samples:
    """As ops.sample_."""
    S, V = logits_SV.shape
    if logits_SV.stride(1) != 1:
        logits_SV = logits_SV.contiguous()
    device = logits_SV.device
    C, G = ceil_div(V, CHUNK), ceil_div(V, GROUP)
    N = min(settings.num_logprobs, V)
    tokens_S = torch.empty(S, dtype=torch.int64, device=device)
    logprobs_S = top_tokens_SN = top_logprobs_SN = None
    if N >= 0:
        logprobs_S = torch.empty(S, dtype=torch.float32, device=device)
        top_tokens_SN = torch.empty((S, N), dtype=torch.int64, device=device)
        top_logprobs_SN = torch.empty((S, N), dtype=torch.float32, device=device)
    if S == 0:
        return Samples(tokens_S, logprobs_S, top_tokens_SN, top_logprobs_SN)
    chunk_floats = torch.empty((S, _CHUNK_FLOATS, C), dtype=torch.float32, device=device)
    chunk_ints = torch.empty((S, _CHUNK_INTS, C), dtype=torch.int32, device=device)
    # Every token of a row may be a candidate, where all are equal.
    searches = settings.any_filter or N > 0
    size = V if searches else 1
    group_max = torch.empty((S, 2, G if searches else 1), dtype=torch.float32, device=device)
    candidates = torch.empty((S, size), dtype=torch.float32, device=device)
    candidate_tokens = torch.empty((S, size), dtype=torch.int32, device=device)
    group_list = torch.empty((S, G if searches else 1), dtype=torch.int32, device=device)
    # Pointers that no row uses still need a place to point at, of the type they would have: one
    # compiled kernel then does for all.
    history = chunk_ints if history_WV is None else history_WV
    common = {
        "CHUNKS": C,
        "num_warps": 8,
        # Products and sums are rounded one by one, as torch does: both kernels, and the
        # reference, then see the same values.
        "enable_fp_fusion": False,
    }
    with on_device(logits_SV):
        _scan_chunks[(C, S)](
            logits_SV,
            settings.words_SP,
            settings.bias_E,
            history,
            chunk_floats,
            chunk_ints,
            group_max,
            logits_SV.stride(0),
            V,
            G,
            INTERPRETED=INTERPRETED,
            **common,
        )
        _pick[(S,)](
            logits_SV,
            settings.words_SP,
            settings.bias_E,
            history,
            chunk_floats,
            chunk_ints,
            group_max,
            group_list,
            candidates,
            candidate_tokens,
            tokens_S,
            chunk_floats if logprobs_S is None else logprobs_S,
            tokens_S if top_tokens_SN is None else top_tokens_SN,
            chunk_floats if top_logprobs_SN is None else top_logprobs_SN,
            logits_SV.stride(0),
            V,
            G,
            N,
            PADDED_CHUNKS=power_of_two(C),
            INTERPRETED=INTERPRETED,
            **common,
        )
    return Samples(tokens_S, logprobs_S, top_tokens_SN, top_logprobs_SN)


_WORD = {name: tl.constexpr(index) for index, name in enumerate(NUMBERS)}
TEMPERATURE, TOP_P, MIN_P = _WORD["temperature"], _WORD["top_p"], _WORD["min_p"]
PRESENCE, FREQUENCY = _WORD["presence_penalty"], _WORD["frequency_penalty"]
REPETITION, TOP_K = _WORD["repetition_penalty"], _WORD["top_k"]
SEED, POSITION = _WORD["seed"], _WORD["position"]
HISTORY_ROW, NUM_LOGPROBS = _WORD["history_row"], _WORD["num_logprobs"]
_BIAS_START, _BIAS_END = tl.constexpr(BIAS_START), tl.constexpr(BIAS_END)
_P = tl.constexpr(NUM_WORDS)
_INVALID = tl.constexpr(INVALID_TOKEN)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_GROUP, _GROUPS, _COLLECTED = tl.constexpr(GROUP), tl.constexpr(GROUPS), tl.constexpr(COLLECTED)
_TILE = tl.constexpr(TILE)
_FLOAT_ROWS, _INT_ROWS = tl.constexpr(_CHUNK_FLOATS), tl.constexpr(_CHUNK_INTS)
_NO_TOKEN = tl.constexpr(2**31 - 1)
# splitmix64's constants, as in reference_sampling.py
_MIX_1 = tl.constexpr(-0x40A7B892E31B1A47)
_MIX_2 = tl.constexpr(-0x6B2FB644ECCEEE15)
_GOLDEN = tl.constexpr(-0x61C8864680B583EB)


@triton.jit
def _float(words_ptr, INDEX: tl.constexpr):
    """One of a row's float words."""
    return tl.load(words_ptr + INDEX).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _has_filter(words_ptr):
    chooses = tl.load(words_ptr + TOP_K) > 0
    chooses |= (_float(words_ptr, TOP_P) < 1) | (_float(words_ptr, MIN_P) > 0)
    return chooses & (_float(words_ptr, TEMPERATURE) > 0)


@triton.jit
def _adjust(x, token, valid, words_ptr, bias_ptr, history_ptr, V):
    """Bias, penalties, temperature; rounding where reference_sampling.py rounds."""
    start, end = tl.load(words_ptr + _BIAS_START), tl.load(words_ptr + _BIAS_END)
    for i in range(start, end):
        entry = tl.load(bias_ptr + i)
        value = entry.to(tl.int32).to(tl.float32, bitcast=True)
        x = tl.where(token == (entry >> 32).to(tl.int32), x + value, x)
    x = tl.where(x != x, float("-inf"), x)
    row = tl.load(words_ptr + HISTORY_ROW)
    if row >= 0:
        history = tl.load(history_ptr + row * V + token, mask=valid, other=0)
        repetition = _float(words_ptr, REPETITION)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
        x = tl.where(history > 0, repeated, x)
        count = (history >> 1).to(tl.float32)
        x -= _float(words_ptr, FREQUENCY) * count
        x -= tl.where(count > 0, _float(words_ptr, PRESENCE), 0.0)
    temperature = _float(words_ptr, TEMPERATURE)
    if temperature > 0:
        x = tl.div_rn(x, tl.maximum(temperature, _MIN_TEMPERATURE) + tl.zeros_like(x))
    return x


@triton.jit
def _weight(x, largest):
    """exp(x - largest), 1 where both are infinite."""
    return tl.exp(tl.where(x == largest, 0.0, x - largest))


@triton.jit
def _log(x, INTERPRETED: tl.constexpr):
    """Triton's own logarithm is off by 2^-22 near 1, where the noise's largest values come from."""
    if INTERPRETED:
        return tl.log(x)
    return libdevice.log(x)


@triton.jit
def _mix(x):
    """splitmix64's step on int64."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noise(token, words_ptr, INTERPRETED: tl.constexpr):
    """Gumbel noise, a function of (seed, position, token id)."""
    key = _mix(_mix(tl.load(words_ptr + SEED)) + tl.load(words_ptr + POSITION))
    bits = _mix(key + token.to(tl.int64) * _GOLDEN)
    uniform = (((bits >> 41) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -_log(-_log(uniform, INTERPRETED), INTERPRETED)


@triton.jit
def _order(x):
    """A float's bits as a uint32 that is ordered as the floats are; 0.0 and -0.0 are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit(do_not_specialize=["G"])
def _scan_chunks(
    logits_ptr,  # [S, V]
    words_ptr,  # [S, P]
    bias_ptr,  # [E]
    history_ptr,  # [W, V]
    floats_ptr,  # [S, FLOAT_ROWS, C]
    ints_ptr,  # [S, INT_ROWS, C]
    group_max_ptr,  # [S, 2, G]: of the logits, and of the adjusted ones
    stride_s,
    V,
    G,
    CHUNKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    words_ptr += row * _P
    floats_ptr += row * _FLOAT_ROWS * CHUNKS + chunk
    ints_ptr += row * _INT_ROWS * CHUNKS + chunk
    group_max_ptr += row * 2 * G
    group = chunk * _GROUPS + tl.arange(0, _GROUPS)
    token = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    valid = token < V
    raw = tl.load(logits_ptr + row * stride_s + token, mask=valid, other=float("-inf"))
    raw = raw.to(tl.float32)
    tl.store(ints_ptr, tl.max((raw != raw).to(tl.int32)))
    num_logprobs = tl.load(words_ptr + NUM_LOGPROBS)
    if num_logprobs >= 0:
        raw_max = tl.max(raw)
        tl.store(floats_ptr, raw_max)
        tl.store(floats_ptr + CHUNKS, tl.sum(_weight(raw, raw_max)))
    if num_logprobs > 0:
        tl.store(group_max_ptr + group, tl.max(raw, 1), mask=group < G)
    x = _adjust(raw, token, valid, words_ptr, bias_ptr, history_ptr, V)
    if _has_filter(words_ptr):
        largest = tl.max(x)
        tl.store(floats_ptr + 2 * CHUNKS, largest)
        tl.store(floats_ptr + 3 * CHUNKS, tl.sum(_weight(x, largest)))
        tl.store(group_max_ptr + G + group, tl.max(x, 1), mask=group < G)
    else:
        if _float(words_ptr, TEMPERATURE) > 0:
            x += _noise(token, words_ptr, INTERPRETED)
        best = tl.max(x)
        tl.store(floats_ptr + 4 * CHUNKS, best)
        tl.store(ints_ptr + CHUNKS, tl.min(tl.where(x == best, token, _NO_TOKEN)))


@triton.jit
def _search(values_ptr, n, target, largest, by_mass, ROUNDS: tl.constexpr):
    """The largest order t such that values of at least t are `target` many, or weigh as much.

    0 where all together do not reach it. With fewer than 8 ROUNDS the low bits stay 0, so t is
    lower than that, by at most 2^(32 - 4 ROUNDS).
    """
    pivot = tl.arange(0, 16)
    found = tl.full([], 0, tl.uint32)
    for i in range(ROUNDS):
        pivots = found + (pivot.to(tl.uint32) << (28 - 4 * i))
        totals = tl.zeros([16], tl.float32)
        for first in range(0, n, _TILE):
            index = first + tl.arange(0, _TILE)
            x = tl.load(values_ptr + index, mask=index < n, other=float("-inf"))
            weight = tl.where(by_mass, _weight(x, largest), 1.0)
            weight = tl.where(index < n, weight, 0.0)
            above = _order(x)[None, :] >= pivots[:, None]
            totals += tl.sum(tl.where(above, weight[None, :], 0.0), 1)
        # totals fall from pivot to pivot, and the first was known to reach the target
        digit = tl.sum(((totals >= target) & (pivot > 0)).to(tl.int32))
        found += digit.to(tl.uint32) << (28 - 4 * i)
    return found


@triton.jit
def _cut(values_ptr, n, target, largest, by_mass):
    """Where the likeliest n' values that are `target` many, or weigh as much, end.

    Returns (t, ties): all above order t, and the first `ties` of those at t.
    """
    t = _search(values_ptr, n, target, largest, by_mass, 8)
    above = 0.0
    each = 0.0
    for first in range(0, n, _TILE):
        index = first + tl.arange(0, _TILE)
        x = tl.load(values_ptr + index, mask=index < n, other=float("-inf"))
        order = tl.where(index < n, _order(x), 0)
        weight = tl.where(by_mass, _weight(x, largest), 1.0)
        above += tl.sum(tl.where(order > t, weight, 0.0))
        each = tl.maximum(each, tl.max(tl.where(order == t, weight, 0.0)))
    ties = tl.ceil((target - above) / tl.maximum(each, 1e-37))
    return t, ties


@triton.jit
def _mass(values_ptr, n, t, ties, largest):
    """What the values that _cut left weigh together."""
    above = 0.0
    each = 0.0
    count = 0.0
    for first in range(0, n, _TILE):
        index = first + tl.arange(0, _TILE)
        x = tl.load(values_ptr + index, mask=index < n, other=float("-inf"))
        order = tl.where(index < n, _order(x), 0)
        weight = _weight(x, largest)
        above += tl.sum(tl.where(order > t, weight, 0.0))
        tie = (order == t) & (index < n)
        each = tl.maximum(each, tl.max(tl.where(tie, weight, 0.0)))
        count += tl.sum(tie.to(tl.float32))
    return above + tl.minimum(count, ties) * each


@triton.jit
def _collect(
    t,
    logits_ptr,
    words_ptr,
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
    """Write the values of at least order t, and their tokens, in order of token. Returns how many.

    The block's threads see each other's writes after it.
    """
    # whoever still reads the last list
    tl.debug_barrier()
    num_groups = 0
    for first in range(0, G, _TILE):
        group = first + tl.arange(0, _TILE)
        x = tl.load(group_max_ptr + group, mask=group < G, other=float("-inf"))
        chosen = ((_order(x) >= t) & (group < G)).to(tl.int32)
        place = num_groups + tl.cumsum(chosen, 0) - 1
        tl.store(group_list_ptr + place, group, mask=chosen > 0)
        num_groups += tl.sum(chosen)
    tl.debug_barrier()
    n = 0
    for first in range(0, num_groups, _COLLECTED):
        index = first + tl.arange(0, _COLLECTED)
        group = tl.load(group_list_ptr + index, mask=index < num_groups, other=0)
        token = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        valid = (token < V) & (index < num_groups)[:, None]
        x = tl.load(logits_ptr + token, mask=valid, other=float("-inf")).to(tl.float32)
        if ADJUSTED:
            x = _adjust(x, token, valid, words_ptr, bias_ptr, history_ptr, V)
        flat = tl.reshape(x, [_COLLECTED * _GROUP])
        chosen = tl.reshape((valid & (_order(x) >= t)).to(tl.int32), [_COLLECTED * _GROUP])
        place = n + tl.cumsum(chosen, 0) - 1
        tl.store(values_ptr + place, flat, mask=chosen > 0)
        tl.store(tokens_ptr + place, tl.reshape(token, [_COLLECTED * _GROUP]), mask=chosen > 0)
        n += tl.sum(chosen)
    tl.debug_barrier()
    return n


@triton.jit(do_not_specialize=["G", "N"])
def _pick(
    logits_ptr,  # [S, V]
    words_ptr,  # [S, P]
    bias_ptr,  # [E]
    history_ptr,  # [W, V]
    floats_ptr,  # [S, FLOAT_ROWS, C]
    ints_ptr,  # [S, INT_ROWS, C]
    group_max_ptr,  # [S, 2, G]
    group_list_ptr,  # [S, G]
    values_ptr,  # [S, V]
    value_tokens_ptr,  # [S, V]
    out_tokens_ptr,  # [S]
    out_logprobs_ptr,  # [S]
    out_top_tokens_ptr,  # [S, N]
    out_top_logprobs_ptr,  # [S, N]
    stride_s,
    V,
    G,
    N,
    CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_s
    words_ptr += row * _P
    floats_ptr += row * _FLOAT_ROWS * CHUNKS
    ints_ptr += row * _INT_ROWS * CHUNKS
    group_max_ptr += row * 2 * G
    group_list_ptr += row * G
    values_ptr += row * V
    value_tokens_ptr += row * V
    c = tl.arange(0, PADDED_CHUNKS)
    inside = c < CHUNKS
    low = float("-inf")
    has_nan = tl.max(tl.load(ints_ptr + c, mask=inside, other=0))

    if _has_filter(words_ptr):
        chunk_max = tl.load(floats_ptr + 2 * CHUNKS + c, mask=inside, other=low)
        chunk_sum = tl.load(floats_ptr + 3 * CHUNKS + c, mask=inside, other=0.0)
        largest = tl.max(chunk_max)
        mass = tl.sum(chunk_sum * _weight(chunk_max, largest))
        top_p, min_p = _float(words_ptr, TOP_P), _float(words_ptr, MIN_P)
        top_k = tl.minimum(tl.load(words_ptr + TOP_K), V).to(tl.float32)
        bound = tl.full([], 0, tl.uint32)
        if min_p > 0:
            bound = _order(largest + _log(min_p, INTERPRETED))
        only_top_p = (top_k == 0) & (min_p == 0)
        if (top_k > 0) | only_top_p:
            # a group weighs at least what its largest value does
            wanted = tl.where(only_top_p, top_p * mass * 1.0001, top_k)
            found = _search(group_max_ptr + G, G, wanted, largest, only_top_p, 4)
            bound = tl.maximum(bound, found)
        n = _collect(
            bound,
            logits_ptr,
            words_ptr,
            bias_ptr,
            history_ptr,
            group_max_ptr + G,
            group_list_ptr,
            values_ptr,
            value_tokens_ptr,
            V,
            G,
            True,
        )
        t = tl.full([], 0, tl.uint32)
        ties = 0.0
        if (top_k > 0) & (top_k < n):
            t, ties = _cut(values_ptr, n, top_k, largest, False)
        if top_p < 1:
            if (top_k > 0) | (min_p > 0):
                mass = _mass(values_ptr, n, t, ties, largest)
            t, ties = _cut(values_ptr, n, top_p * mass, largest, True)
        best = low
        drawn = tl.full([], _NO_TOKEN, tl.int32)
        num_ties = 0
        for first in range(0, n, _TILE):
            index = first + tl.arange(0, _TILE)
            x = tl.load(values_ptr + index, mask=index < n, other=low)
            token = tl.load(value_tokens_ptr + index, mask=index < n, other=_NO_TOKEN)
            order = tl.where(index < n, _order(x), 0)
            tie = ((order == t) & (index < n)).to(tl.int32)
            rank = num_ties + tl.cumsum(tie, 0) - tie
            kept = (order > t) | ((tie > 0) & (rank < ties))
            num_ties += tl.sum(tie)
            score = tl.where(kept, x + _noise(token, words_ptr, INTERPRETED), low)
            tile_best = tl.max(score)
            tile_token = tl.min(tl.where(kept & (score == tile_best), token, _NO_TOKEN))
            better = (tile_best > best) | (drawn == _NO_TOKEN)
            drawn = tl.where(better, tile_token, drawn)
            best = tl.where(better, tile_best, best)
    else:
        chunk_best = tl.load(floats_ptr + 4 * CHUNKS + c, mask=inside, other=low)
        chunk_token = tl.load(ints_ptr + CHUNKS + c, mask=inside, other=_NO_TOKEN)
        drawn = tl.min(tl.where(chunk_best == tl.max(chunk_best), chunk_token, _NO_TOKEN))

    drawn = tl.where(has_nan > 0, _INVALID, drawn)
    tl.store(out_tokens_ptr + row, drawn.to(tl.int64))
    history_row = tl.load(words_ptr + HISTORY_ROW)
    if (history_row >= 0) & (drawn >= 0):
        entry = history_ptr + history_row * V + drawn
        tl.store(entry, tl.load(entry) + 2)

    num_logprobs = tl.minimum(tl.load(words_ptr + NUM_LOGPROBS), V).to(tl.int32)
    if num_logprobs >= 0:
        chunk_max = tl.load(floats_ptr + c, mask=inside, other=low)
        chunk_sum = tl.load(floats_ptr + CHUNKS + c, mask=inside, other=0.0)
        largest = tl.max(chunk_max)
        total = tl.sum(chunk_sum * _weight(chunk_max, largest))
        log_total = largest + _log(total, INTERPRETED)
        logit = tl.load(logits_ptr + tl.maximum(drawn, 0)).to(tl.float32)
        tl.store(out_logprobs_ptr + row, logit - log_total)
        slot = tl.arange(0, 32)
        top_token = tl.full([32], -1, tl.int64)
        top_logprob = tl.full([32], float("-inf"), tl.float32)
        if num_logprobs > 0:
            wanted = num_logprobs.to(tl.float32)
            bound = _search(group_max_ptr, G, wanted, 0.0, False, 4)
            n = _collect(
                bound,
                logits_ptr,
                words_ptr,
                bias_ptr,
                history_ptr,
                group_max_ptr,
                group_list_ptr,
                values_ptr,
                value_tokens_ptr,
                V,
                G,
                False,
            )
            last, last_token = float("inf"), -1
            for i in range(0, num_logprobs):
                best = low
                best_token = tl.full([], _NO_TOKEN, tl.int32)
                for first in range(0, n, _TILE):
                    index = first + tl.arange(0, _TILE)
                    x = tl.load(values_ptr + index, mask=index < n, other=low)
                    token = tl.load(value_tokens_ptr + index, mask=index < n, other=_NO_TOKEN)
                    after = (x < last) | ((x == last) & (token > last_token))
                    after &= index < n
                    tile_best = tl.max(tl.where(after, x, low))
                    tile_token = tl.min(tl.where(after & (x == tile_best), token, _NO_TOKEN))
                    better = (tile_best > best) | (best_token == _NO_TOKEN)
                    best_token = tl.where(better, tile_token, best_token)
                    best = tl.where(better, tile_best, best)
                last, last_token = best, best_token
                top_token = tl.where(slot == i, best_token.to(tl.int64), top_token)
                top_logprob = tl.where(slot == i, best - log_total, top_logprob)
        tl.store(out_top_tokens_ptr + row * N + slot, top_token, mask=slot < N)
        tl.store(out_top_logprobs_ptr + row * N + slot, top_logprob, mask=slot < N)
    else:
        # another row asked
        if N >= 0:
            slot = tl.arange(0, 32)
            tl.store(out_logprobs_ptr + row, low)
            tl.store(out_top_tokens_ptr + row * N + slot, tl.full([32], -1, tl.int64), slot < N)
            none = tl.full([32], float("-inf"), tl.float32)
            tl.store(out_top_logprobs_ptr + row * N + slot, none, slot < N)
