"""Sampling in two Triton kernels, without a sort.

The first kernel reads each row once, in chunks on as many SMs as there are. It finds the best token
of rows without a filter, sums for log probabilities, and the largest value of every group of 64
tokens. In the second kernel, one block finishes each row. The k-th largest of the groups' maxima is
at most the row's k-th largest value, so a search over the maxima gives a lower bound; only the few
groups that reach it are read again for candidates (candidates.py).

A row's results depend only on that row: sums are computed chunk by chunk, however many chunks a
block reads. Legend: S rows, V vocabulary, W rows of the history table, N alternatives, G groups, C
chunks.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import INTERPRETED
from qkernels.gpu.launch import launch, launches_nothing, on_device
from qkernels.sampling.candidates import (
    FEW,
    GROUP,
    NO_TOKEN,
    collect,
    draw_few,
    draw_many,
    search,
    store_few,
    store_many,
)
from qkernels.sampling.logits import adjust, filters, key_of, log, noise, order, settings_of, weight
from qkernels.sampling.settings import Samples, SampleSettings
from qkernels.sampling.words import NUM_WORDS, NUMBERS

CHUNK_GROUPS = 16  # groups per chunk of the first kernel
CHUNK = GROUP * CHUNK_GROUPS
FEW_CHUNKS = 2048
CHUNKS_OF_BLOCK = 8

# Rows of the first kernel's results: one value per chunk, in the last row one per block.
_CHUNK_FLOATS = 5  # raw largest, raw sum, largest, sum, best score
_CHUNK_INTS = 2  # per block: 1 if there is NaN, best token


def sample_(
    logits_SV: torch.Tensor, settings: SampleSettings, history_WV: torch.Tensor | None = None
) -> Samples:
    """Implement ops.sample_."""
    S, V = logits_SV.shape
    if logits_SV.stride(1) != 1:
        logits_SV = logits_SV.contiguous()
    device = logits_SV.device
    C, G = ceil_div(V, CHUNK), ceil_div(V, GROUP)
    N = min(settings.num_logprobs, V)
    # if launches are only recorded, a drafter still looks up the tokens' embeddings
    new_tokens = torch.zeros if launches_nothing() else torch.empty
    tokens_S = new_tokens(S, dtype=torch.int64, device=device)
    logprobs_S = top_tokens_SN = top_logprobs_SN = None
    if N >= 0:
        logprobs_S = torch.empty(S, dtype=torch.float32, device=device)
        top_tokens_SN = torch.empty((S, N), dtype=torch.int64, device=device)
        top_logprobs_SN = torch.empty((S, N), dtype=torch.float32, device=device)
    if S == 0:
        return Samples(tokens_S, logprobs_S, top_tokens_SN, top_logprobs_SN)
    # few rows: one chunk per block, to use more SMs; many rows: several, to pay less overhead
    chunks_of_block = 1 if S * C <= FEW_CHUNKS else CHUNKS_OF_BLOCK
    blocks = ceil_div(C, chunks_of_block)
    chunk_floats = torch.empty((S, _CHUNK_FLOATS, C), dtype=torch.float32, device=device)
    chunk_ints = torch.empty((S, _CHUNK_INTS, C), dtype=torch.int32, device=device)
    # if all values are equal, every token of a row may be a candidate
    searches = settings.any_filter or N > 0
    size = V if searches else 1
    group_max = torch.empty((S, 2, G if searches else 1), dtype=torch.float32, device=device)
    candidates = torch.empty((S, size), dtype=torch.float32, device=device)
    candidate_tokens = torch.empty((S, size), dtype=torch.int32, device=device)
    group_list = torch.empty((S, G if searches else 1), dtype=torch.int32, device=device)
    # unused pointers still need a tensor of the right type, so that one compiled kernel serves all
    # calls
    history = chunk_ints if history_WV is None else history_WV
    # no fused multiply-adds: products and sums are rounded separately, as in torch, so that both
    # kernels and the reference see the same values
    options = {"num_warps": 8, "enable_fp_fusion": False}
    with on_device(logits_SV):
        launch(
            _scan_chunks,
            (blocks, S),
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
            C,
            chunks_of_block,
            INTERPRETED=INTERPRETED,
            **options,
        )
        launch(
            _pick,
            (S,),
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
            C,
            blocks,
            settings.invalid_token,
            PADDED_CHUNKS=power_of_two(C),
            INTERPRETED=INTERPRETED,
            **options,
        )
    return Samples(tokens_S, logprobs_S, top_tokens_SN, top_logprobs_SN)


NUM_LOGPROBS = tl.constexpr(NUMBERS.index("num_logprobs"))
_P = tl.constexpr(NUM_WORDS)
_GROUP, _CHUNK_GROUPS, _FEW = tl.constexpr(GROUP), tl.constexpr(CHUNK_GROUPS), tl.constexpr(FEW)
_FLOAT_ROWS, _INT_ROWS = tl.constexpr(_CHUNK_FLOATS), tl.constexpr(_CHUNK_INTS)


@triton.jit(do_not_specialize=["G", "CHUNKS", "CHUNKS_OF_BLOCK"])
def _scan_chunks(
    logits_ptr,  # [S, V]
    words_ptr,  # [S, P]
    bias_ptr,  # [E]
    history_ptr,  # [W, V]
    floats_ptr,  # [S, FLOAT_ROWS, C]: the last row by block
    ints_ptr,  # [S, INT_ROWS, C], by block
    group_max_ptr,  # [S, 2, G]: largest logit, and largest adjusted logit
    stride_s,
    V,
    G,
    CHUNKS,
    CHUNKS_OF_BLOCK,
    INTERPRETED: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    words_ptr += row * _P
    floats_ptr += row * _FLOAT_ROWS * CHUNKS
    ints_ptr += row * _INT_ROWS * CHUNKS
    group_max_ptr += row * 2 * G
    num_logprobs = tl.load(words_ptr + NUM_LOGPROBS)
    settings = settings_of(words_ptr)
    is_random = settings[0] > 0
    top_k, top_p, min_p = filters(words_ptr)
    is_filtered = is_random & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    key = tl.full([], 0, tl.int64)
    if is_random:
        key = key_of(words_ptr)
    has_nan = tl.zeros([_CHUNK_GROUPS, _GROUP], tl.int32)
    # best score of the tokens that a thread has seen
    best = tl.full([_CHUNK_GROUPS, _GROUP], float("-inf"), tl.float32)
    best_token = tl.full([_CHUNK_GROUPS, _GROUP], NO_TOKEN, tl.int32)
    for i in range(CHUNKS_OF_BLOCK):
        chunk = block * CHUNKS_OF_BLOCK + i
        exists = chunk < CHUNKS
        group = chunk * _CHUNK_GROUPS + tl.arange(0, _CHUNK_GROUPS)
        token = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        valid = token < V
        raw = tl.load(logits_ptr + row * stride_s + token, mask=valid, other=float("-inf"))
        raw = raw.to(tl.float32)
        has_nan |= (raw != raw).to(tl.int32)
        if num_logprobs >= 0:
            raw_max = tl.max(raw)
            tl.store(floats_ptr + chunk, raw_max, mask=exists)
            tl.store(floats_ptr + CHUNKS + chunk, tl.sum(weight(raw, raw_max)), mask=exists)
        if num_logprobs > 0:
            tl.store(group_max_ptr + group, tl.max(raw, 1), mask=group < G)
        x = adjust(raw, token, valid, settings, bias_ptr, history_ptr, V)
        if is_filtered:
            largest = tl.max(x)
            tl.store(floats_ptr + 2 * CHUNKS + chunk, largest, mask=exists)
            tl.store(floats_ptr + 3 * CHUNKS + chunk, tl.sum(weight(x, largest)), mask=exists)
            tl.store(group_max_ptr + G + group, tl.max(x, 1), mask=group < G)
        else:
            if is_random:
                x += noise(token, key, INTERPRETED)
            wins = (x > best) | (best_token == NO_TOKEN)
            best = tl.where(wins, x, best)
            best_token = tl.where(wins, token, best_token)
    tl.store(ints_ptr + block, tl.max(has_nan))
    if not is_filtered:
        block_best = tl.max(best)
        tl.store(floats_ptr + 4 * CHUNKS + block, block_best)
        first = tl.min(tl.where(best == block_best, best_token, NO_TOKEN))
        tl.store(ints_ptr + CHUNKS + block, first)


@triton.jit
def _draw(
    words_ptr,
    floats_ptr,
    group_max_ptr,
    logits_ptr,
    settings,
    bias_ptr,
    history_ptr,
    group_list_ptr,
    values_ptr,
    tokens_ptr,
    V,
    G,
    CHUNKS,
    PADDED_CHUNKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Draw the token of a row with top-k, top-p or min-p."""
    top_k, top_p, min_p = filters(words_ptr)
    key = key_of(words_ptr)
    c = tl.arange(0, PADDED_CHUNKS)
    chunk_max = tl.load(floats_ptr + 2 * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    chunk_sum = tl.load(floats_ptr + 3 * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    largest = tl.max(chunk_max)
    mass = tl.sum(chunk_sum * weight(chunk_max, largest))
    top_k = tl.minimum(top_k, V).to(tl.float32)
    only_top_p = (top_k == 0) & (min_p == 0)
    bound = tl.full([], 0, tl.uint32)
    if min_p > 0:
        bound = order(largest + log(min_p, INTERPRETED))
    if (top_k > 0) | only_top_p:
        # the probability of a group is at least that of its largest value
        wanted = tl.where(only_top_p, top_p * mass * 1.0001, top_k)
        found = search(group_max_ptr, G, wanted, largest, only_top_p, 4)
        bound = tl.maximum(bound, found)
    if only_top_p:
        # V values below this bound together have less probability than top_p leaves out
        spare = tl.maximum((1 - top_p) * 0.999, 1e-9) * mass / V
        bound = tl.maximum(bound, order(largest + log(spare, INTERPRETED)))
    n = collect(
        bound,
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
        True,
    )
    if n <= _FEW:
        drawn = draw_few(
            values_ptr, tokens_ptr, n, top_k, top_p, mass, only_top_p, largest, key, INTERPRETED
        )
    else:
        drawn = draw_many(
            values_ptr, tokens_ptr, n, top_k, top_p, mass, only_top_p, largest, key, INTERPRETED
        )
    return drawn


@triton.jit(do_not_specialize=["G", "N", "CHUNKS", "BLOCKS", "invalid_token"])
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
    CHUNKS,
    BLOCKS,
    invalid_token,
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
    nan = tl.load(ints_ptr + c, mask=c < BLOCKS, other=0)
    num_logprobs = tl.minimum(tl.load(words_ptr + NUM_LOGPROBS), V).to(tl.int32)
    top_k, top_p, min_p = filters(words_ptr)
    settings = settings_of(words_ptr)
    if (settings[0] > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        drawn = _draw(
            words_ptr,
            floats_ptr,
            group_max_ptr + G,
            logits_ptr,
            settings,
            bias_ptr,
            history_ptr,
            group_list_ptr,
            values_ptr,
            value_tokens_ptr,
            V,
            G,
            CHUNKS,
            PADDED_CHUNKS,
            INTERPRETED,
        )
    else:
        block_best = tl.load(floats_ptr + 4 * CHUNKS + c, mask=c < BLOCKS, other=low)
        block_token = tl.load(ints_ptr + CHUNKS + c, mask=c < BLOCKS, other=NO_TOKEN)
        drawn = tl.min(tl.where(block_best == tl.max(block_best), block_token, NO_TOKEN))
    drawn = tl.where(tl.max(nan) > 0, invalid_token, drawn)
    tl.store(out_tokens_ptr + row, drawn.to(tl.int64))
    history_row = settings[4]
    if (history_row >= 0) & (drawn >= 0):
        entry = history_ptr + history_row * V + drawn
        tl.store(entry, tl.load(entry) + 2)

    if N >= 0:
        slot = tl.arange(0, 32)
        unused = (slot >= num_logprobs) & (slot < N)
        out_top_tokens_ptr += row * N
        out_top_logprobs_ptr += row * N
        tl.store(out_top_tokens_ptr + slot, tl.full([32], -1, tl.int64), mask=unused)
        tl.store(out_top_logprobs_ptr + slot, tl.full([32], low, tl.float32), mask=unused)
        if num_logprobs < 0:
            tl.store(out_logprobs_ptr + row, low)
        else:
            chunk_max = tl.load(floats_ptr + c, mask=inside, other=low)
            chunk_sum = tl.load(floats_ptr + CHUNKS + c, mask=inside, other=0.0)
            largest = tl.max(chunk_max)
            total = tl.sum(chunk_sum * weight(chunk_max, largest))
            log_total = largest + log(total, INTERPRETED)
            logit = tl.load(logits_ptr + tl.maximum(drawn, 0)).to(tl.float32)
            tl.store(out_logprobs_ptr + row, logit - log_total)
            if num_logprobs > 0:
                wanted = num_logprobs.to(tl.float32)
                n = collect(
                    search(group_max_ptr, G, wanted, 0.0, False, 4),
                    logits_ptr,
                    settings,
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
                if n <= _FEW:
                    store_few(
                        values_ptr,
                        value_tokens_ptr,
                        n,
                        num_logprobs,
                        log_total,
                        out_top_tokens_ptr,
                        out_top_logprobs_ptr,
                    )
                else:
                    store_many(
                        values_ptr,
                        value_tokens_ptr,
                        n,
                        num_logprobs,
                        log_total,
                        out_top_tokens_ptr,
                        out_top_logprobs_ptr,
                    )
