"""Verify drafts and prepare the next ones, in one Triton kernel with one block per chunk.

Legend: see chunks.py.
"""

import torch
import triton
import triton.language as tl

from qkernels.drafts.chunks import NEUTRAL, DraftChunks, DraftPositions, DraftTables, Settled
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, launches_nothing, on_device
from qkernels.sampling.words import NUM_WORDS, POSITION

BLOCK = 512  # rows per iteration over the chunk of a prompt


def settle_drafts_(
    tokens_S: torch.Tensor | None,
    words_SP: torch.Tensor | None,
    chunks: DraftChunks,
    tables: DraftTables,
    *,
    num_drafts: int,
    page_size: int,
    max_model_len: int,
    passes_DK: torch.Tensor | None = None,
    accepted_D: torch.Tensor | None = None,
) -> Settled:
    """Implement ops.settle_drafts_."""
    token_ids_T, device = chunks.token_ids_T, chunks.rows_R.device
    D, K = len(chunks.chunk_D), num_drafts
    # each draft's positions start at a 16-byte boundary, as other kernels expect
    stride = ceil_div(D, 4) * 4
    S = 0 if tokens_S is None else len(tokens_S)
    # if launches are only recorded, other operations still use tokens and rows as indices
    new = torch.zeros if launches_nothing() else torch.empty
    int64 = {"dtype": torch.int64, "device": device}
    settled = Settled(
        for_host=new(S + D, **int64),
        next_tokens_T=new(len(token_ids_T), **int64),
        last_rows_D=new(D, **int64),
        rows_D=new(D, **int64),
        words_KDP=new((K, D, NUM_WORDS), **int64),
        draft_positions=DraftPositions(
            positions_KD=new((K, stride), **int64)[:, :D],
            slots_KD=new((K, stride), **int64)[:, :D],
            lengths_KD=new((K, stride), dtype=torch.int32, device=device)[:, :D],
        ),
    )
    # unused pointers still need a tensor
    nothing = chunks.rows_R
    with on_device(nothing):
        launch(
            _settle_drafts,
            (len(chunks.rows_R),),
            nothing if tokens_S is None else tokens_S,
            nothing if words_SP is None else words_SP,
            nothing if passes_DK is None else passes_DK,
            nothing if accepted_D is None else accepted_D,
            token_ids_T,
            chunks.positions_T,
            chunks.query_starts_R1,
            chunks.block_tables_RX,
            chunks.rows_R,
            chunks.next_R,
            chunks.capacity_R,
            chunks.place_R,
            chunks.first_D,
            chunks.count_D,
            tables.tokens_NK1,
            tables.rejected_N,
            *settled[:5],
            *settled.draft_positions,
            len(token_ids_T),
            S,
            D,
            chunks.block_tables_RX.shape[1],
            chunks.block_tables_RX.stride(0),
            stride,
            tables.tokens_NK1.shape[1],
            chunks.max_sampled,
            K,
            page_size,
            max_model_len,
            HAS_PASSES=passes_DK is not None,
            HAS_ACCEPTED=accepted_D is not None,
            BLOCK=BLOCK,
            COLUMNS=power_of_two(tables.tokens_NK1.shape[1]),
            num_warps=4,
        )
    return settled


_P, _POSITION = tl.constexpr(NUM_WORDS), tl.constexpr(POSITION)
_PADDED_P = tl.constexpr(power_of_two(NUM_WORDS))
_NEUTRAL_ZERO = tl.constexpr(sum(1 << word for word, value in NEUTRAL.items() if value == 0))
_NEUTRAL_ONES = tl.constexpr(sum(1 << word for word, value in NEUTRAL.items() if value == -1))


@triton.jit(
    do_not_specialize=[
        *(
            "T",
            "S",
            "D",
            "X",
            "stride_table",
            "stride_place",
            "K1",
            "max_sampled",
            "K",
            "page_size",
        ),
        "max_model_len",
    ]
)
def _settle_drafts(
    tokens_ptr,  # [S]
    words_ptr,  # [S, P]
    passes_ptr,  # [D, max_sampled - 1]
    accepted_ptr,  # [D]
    token_ids_ptr,  # [T]
    positions_ptr,  # [T]
    starts_ptr,  # [R + 1]
    block_tables_ptr,  # [R, X]
    rows_ptr,  # [R]
    next_ptr,  # [R]
    capacity_ptr,  # [R]
    place_ptr,  # [R]
    first_ptr,  # [D]
    count_ptr,  # [D]
    newest_ptr,  # [N, K1]
    rejected_ptr,  # [N]
    for_host_ptr,  # [S + D]
    next_tokens_ptr,  # [T]
    last_rows_ptr,  # [D]
    rows_of_d_ptr,  # [D]
    draft_words_ptr,  # [K, D, P]
    draft_positions_ptr,  # [K, stride_place]
    draft_slots_ptr,  # [K, stride_place]
    draft_lengths_ptr,  # [K, stride_place]
    T,
    S,
    D,
    X,
    stride_table,
    stride_place,
    K1,
    max_sampled,
    K,
    page_size,
    max_model_len,
    HAS_PASSES: tl.constexpr,
    HAS_ACCEPTED: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    r = tl.program_id(0)
    start, end = tl.load(starts_ptr + r), tl.load(starts_ptr + r + 1)
    d = tl.load(place_ptr + r)
    first, count = 0, 0
    if d >= 0:
        first, count = tl.load(first_ptr + d).to(tl.int32), tl.load(count_ptr + d).to(tl.int32)
    # a row that is not sampled is followed by the chunk's next token
    for begin in range(start, end - count, BLOCK):
        t = begin + tl.arange(0, BLOCK)
        token = tl.load(token_ids_ptr + t + 1, mask=t + 1 < end, other=0)
        token = tl.where(t + 1 == end, tl.load(next_ptr + r), token)
        tl.store(next_tokens_ptr + t, token, mask=t < end - count)
    if r == tl.num_programs(0) - 1:
        for begin in range(end, T, BLOCK):
            t = begin + tl.arange(0, BLOCK)
            tl.store(next_tokens_ptr + t, tl.zeros([BLOCK], tl.int64), mask=t < T)
    if d >= 0:
        row = tl.load(rows_ptr + r)
        capacity = tl.load(capacity_ptr + r)
        begin = end - count  # index in T of the first sampled row
        k = tl.arange(0, COLUMNS)
        token = tl.load(tokens_ptr + first + k, mask=k < count, other=0)
        is_draft = k < count - 1
        draft = tl.load(token_ids_ptr + begin + k + 1, mask=is_draft, other=0)
        if HAS_ACCEPTED:
            accepted = tl.load(accepted_ptr + d).to(tl.int32)
        else:
            if HAS_PASSES:
                passes_ptr += d * (max_sampled - 1)
                agrees = tl.load(passes_ptr + k, mask=is_draft, other=0) != 0
            else:
                agrees = token == draft
            # the last row verifies no draft, so it always ends the run of accepted drafts
            accepted = tl.min(tl.where(is_draft & agrees, COLUMNS, k), 0)
        if HAS_PASSES:
            token = tl.where(k < accepted, draft, token)
            tl.store(tokens_ptr + first + k, token, mask=k < accepted)
        tl.store(for_host_ptr + first + k, token, mask=k < count)
        tl.store(for_host_ptr + S + d, (accepted + 1).to(tl.int64))
        token = tl.maximum(token, 0)
        tl.store(next_tokens_ptr + begin + k, token, mask=k < count)
        newest = tl.sum(tl.where(k == accepted, token, 0), 0)
        tl.store(newest_ptr + row * K1, newest)
        tl.store(rejected_ptr + row, (count - 1 - accepted).to(tl.int64))
        last = begin + accepted
        tl.store(last_rows_ptr + d, last.to(tl.int64))
        tl.store(rows_of_d_ptr + d, row)
        position = tl.load(positions_ptr + last)
        # of the drafts that follow
        is_next = k < K
        wanted = position + 1 + k
        at = tl.minimum(wanted, max_model_len - 1)
        page_index = tl.minimum(at // page_size, X - 1)
        table_ptr = block_tables_ptr + r.to(tl.int64) * stride_table
        page = tl.load(table_ptr + page_index, mask=is_next, other=0).to(tl.int64)
        slot = tl.where(wanted < capacity, page * page_size + at % page_size, -1)
        place = k * stride_place + d
        tl.store(draft_positions_ptr + place, at, mask=is_next)
        tl.store(draft_slots_ptr + place, slot, mask=is_next)
        length = tl.minimum(at + 1, capacity).to(tl.int32)
        tl.store(draft_lengths_ptr + place, length, mask=is_next)
        p = tl.arange(0, _PADDED_P)
        zeros = tl.full([_PADDED_P], _NEUTRAL_ZERO, tl.int32)
        ones = tl.full([_PADDED_P], _NEUTRAL_ONES, tl.int32)
        drawn = (first + accepted).to(tl.int64)
        word = tl.load(words_ptr + drawn * _P + p, mask=p < _P, other=0)
        word = tl.where(((zeros >> p) & 1) != 0, 0, word)
        word = tl.where(((ones >> p) & 1) != 0, -1, word)
        ahead = (p == _POSITION).to(tl.int64)[None, :] * (k + 1)[:, None]
        place_KP = (k * D + d)[:, None] * _P + p[None, :]
        tl.store(
            draft_words_ptr + place_KP,
            word[None, :] + ahead,
            mask=is_next[:, None] & (p < _P)[None, :],
        )
