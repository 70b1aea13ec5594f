"""Plain torch references of the draft operations. Legend: see chunks.py."""

import torch

from qkernels.drafts.chunks import NEUTRAL, DraftChunks, DraftPositions, DraftTables, Settled
from qkernels.sampling.words import NUM_WORDS, POSITION


def fill_drafts_(
    chunks: DraftChunks,
    tables: DraftTables,
    *,
    page_size: int,
    words_TP: torch.Tensor | None = None,
    fills_tokens: bool = True,
) -> torch.Tensor:
    """Reference of ops.fill_drafts_."""
    rows_R, known_R = chunks.rows_R, chunks.known_R
    chunk_T, column_T = _rows_of(chunks)
    count = len(chunk_T)
    token_ids_T, positions_T = chunks.token_ids_T[:count], chunks.positions_T[:count]
    if fills_tokens:
        # known tokens may be a prompt with more tokens than the table has columns
        last = tables.tokens_NK1.shape[1] - 1
        tokens_T = tables.tokens_NK1[rows_R[chunk_T], column_T.clamp(max=last)]
        token_ids_T.copy_(torch.where(column_T < known_R[chunk_T], token_ids_T, tokens_T))
    back_R = torch.where(known_R == 0, tables.rejected_N[rows_R], 0)
    back_T = back_R[chunk_T]
    positions_T -= back_T
    slots_T = chunks.slots_T[:count]
    pages_T = chunks.block_tables_RX[chunk_T, positions_T // page_size].long()
    new_T = pages_T * page_size + positions_T % page_size
    slots_T.copy_(torch.where((slots_T < 0) | (back_T == 0), slots_T, new_T))
    chunks.context_lengths_R[: len(back_R)] -= back_R.to(torch.int32)
    if words_TP is not None:
        words_TP[:count, POSITION] -= back_T
    return back_R


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
    """Reference of ops.settle_drafts_."""
    first_D, count_D = chunks.first_D, chunks.count_D
    rows_D = chunks.rows_R[chunks.chunk_D]
    ends_R = chunks.query_starts_R1[1 : len(chunks.rows_R) + 1].long()
    next_T = torch.roll(chunks.token_ids_T, -1)
    next_T[int(ends_R[-1]) :] = 0
    next_T[ends_R - 1] = chunks.next_R
    if tokens_S is None:
        tokens_S = rows_D.new_empty(0)
        words_SP = rows_D.new_empty(0, NUM_WORDS)
    # of S, by chunk; beyond its rows the last
    column_K1 = torch.arange(chunks.max_sampled, device=rows_D.device)
    column_DK1 = torch.minimum(column_K1, count_D[:, None] - 1)
    rows_DK1 = first_D[:, None] + column_DK1
    # of T
    begin_D = ends_R[chunks.chunk_D] - count_D
    places_DK1 = begin_D[:, None] + column_DK1
    drafts_DK = chunks.token_ids_T[places_DK1[:, 1:]]
    if accepted_D is None:
        agrees_DK = tokens_S[rows_DK1[:, :-1]] == drafts_DK if passes_DK is None else passes_DK
        is_draft_DK = column_K1[:-1] < count_D[:, None] - 1
        accepted_D = (agrees_DK & is_draft_DK).long().cumprod(1).sum(1)
    if passes_DK is not None:
        taken_DK = column_K1[:-1] < accepted_D[:, None]
        rows_DK = rows_DK1[:, :-1]
        tokens_S[rows_DK[taken_DK]] = drafts_DK[taken_DK]
    next_T[places_DK1] = tokens_S[rows_DK1].clamp(min=0)
    drawn_D = first_D + accepted_D
    last_D = begin_D + accepted_D
    tables.tokens_NK1[rows_D, 0] = tokens_S[drawn_D].clamp(min=0)
    tables.rejected_N[rows_D] = count_D - 1 - accepted_D
    return Settled(
        for_host=torch.cat([tokens_S, accepted_D + 1]),
        next_tokens_T=next_T,
        last_rows_D=last_D,
        rows_D=rows_D,
        words_KDP=draft_words(words_SP[drawn_D], num_drafts),
        draft_positions=draft_positions(
            chunks.positions_T[last_D],
            chunks.block_tables_RX[chunks.chunk_D],
            chunks.capacity_R[chunks.chunk_D],
            num_drafts=num_drafts,
            page_size=page_size,
            max_model_len=max_model_len,
        ),
    )


def spread_logits(logits_DU: torch.Tensor, columns_V: torch.Tensor) -> torch.Tensor:
    """Reference of ops.spread_logits."""
    spread_DV = logits_DU[:, columns_V.clamp(min=0).long()]
    return spread_DV.masked_fill_(columns_V < 0, -torch.inf)


def draft_words(words_DP: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """Return the sampling words [K, D, P] of `num_drafts` drafts after the tokens of `words_DP`."""
    words_KDP = words_DP.expand(num_drafts, *words_DP.shape).clone()
    ahead_K1 = torch.arange(1, num_drafts + 1, device=words_DP.device)[:, None]
    words_KDP[:, :, POSITION] += ahead_K1
    for column, value in NEUTRAL.items():
        words_KDP[:, :, column] = value
    return words_KDP


def draft_positions(
    positions_D: torch.Tensor,
    tables_DX: torch.Tensor,
    capacity_D: torch.Tensor,
    *,
    num_drafts: int,
    page_size: int,
    max_model_len: int,
) -> DraftPositions:
    """Return positions and slots of the rows 1, 2 .. `num_drafts` positions after `positions_D`."""
    wanted_KD = positions_D + torch.arange(1, num_drafts + 1, device=positions_D.device)[:, None]
    positions_KD = wanted_KD.clamp(max=max_model_len - 1)
    pages_KD = (positions_KD // page_size).clamp(max=tables_DX.shape[1] - 1)
    slots_KD = tables_DX.long().gather(1, pages_KD.T).T * page_size + positions_KD % page_size
    return DraftPositions(
        positions_KD=positions_KD,
        slots_KD=torch.where(wanted_KD < capacity_D, slots_KD, -1),
        # if the row is beyond the pages, its keys end with the pages
        lengths_KD=torch.minimum(positions_KD + 1, capacity_D).to(torch.int32),
    )


def _rows_of(chunks: DraftChunks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunk of each row, and the row's index in the chunk."""
    starts_R1 = chunks.query_starts_R1[: len(chunks.rows_R) + 1].long()
    chunk_T = torch.repeat_interleave(starts_R1.diff())
    return chunk_T, torch.arange(len(chunk_T), device=chunk_T.device) - starts_R1[chunk_T]
