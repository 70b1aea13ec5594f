"""Fill in tokens and positions that only the device knows, in Triton with one block per chunk.

Legend: see chunks.py.
"""

import torch
import triton
import triton.language as tl

from qkernels.drafts.chunks import DraftChunks, DraftTables
from qkernels.gpu.launch import launch, on_device
from qkernels.sampling.words import NUM_WORDS, POSITION

BLOCK = 128  # rows per iteration: a verification has few rows, and prompt rows are not changed


def fill_drafts_(
    chunks: DraftChunks,
    tables: DraftTables,
    *,
    page_size: int,
    words_TP: torch.Tensor | None = None,
    fills_tokens: bool = True,
) -> torch.Tensor:
    """Implement ops.fill_drafts_."""
    R = len(chunks.rows_R)
    back_R = torch.empty_like(chunks.rows_R)
    with on_device(back_R):
        launch(
            _fill_drafts,
            (R,),
            chunks.token_ids_T,
            chunks.positions_T,
            chunks.slots_T,
            chunks.context_lengths_R,
            chunks.query_starts_R1,
            chunks.block_tables_RX,
            chunks.rows_R,
            chunks.known_R,
            tables.tokens_NK1,
            tables.rejected_N,
            back_R if words_TP is None else words_TP,
            back_R,
            chunks.block_tables_RX.stride(0),
            tables.tokens_NK1.shape[1],
            page_size,
            # not constants: one compiled kernel serves all values
            int(words_TP is not None),
            int(fills_tokens),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return back_R


_P, _POSITION = tl.constexpr(NUM_WORDS), tl.constexpr(POSITION)


@triton.jit(do_not_specialize=["stride_table", "K1", "page_size", "has_words", "fills_tokens"])
def _fill_drafts(
    tokens_ptr,  # [T]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    lengths_ptr,  # [R]
    starts_ptr,  # [R + 1]
    block_tables_ptr,  # [R, X]
    rows_ptr,  # [R]
    known_ptr,  # [R]
    newest_ptr,  # [N, K1]
    rejected_ptr,  # [N]
    words_ptr,  # [T, P]
    back_ptr,  # [R]
    stride_table,
    K1,
    page_size,
    has_words,
    fills_tokens,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0)
    start, end = tl.load(starts_ptr + r), tl.load(starts_ptr + r + 1)
    row, known = tl.load(rows_ptr + r), tl.load(known_ptr + r)
    back = tl.full([], 0, tl.int64)
    if known == 0:
        back = tl.load(rejected_ptr + row)
    tl.store(back_ptr + r, back)
    first = tl.minimum(known, end - start).to(tl.int32)
    for begin in range(first, end - start, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        t = start + column
        inside = t < end
        if fills_tokens != 0:
            token = tl.load(newest_ptr + row * K1 + column, mask=inside & (column < K1), other=0)
            tl.store(tokens_ptr + t, token, mask=inside)
        if back != 0:
            position = tl.load(positions_ptr + t, mask=inside, other=0) - back
            tl.store(positions_ptr + t, position, mask=inside)
            slot = tl.load(slots_ptr + t, mask=inside, other=-1)
            table_ptr = block_tables_ptr + r.to(tl.int64) * stride_table
            page = tl.load(table_ptr + position // page_size, mask=inside, other=0).to(tl.int64)
            new_slot = page * page_size + position % page_size
            tl.store(slots_ptr + t, new_slot, mask=inside & (slot >= 0))
            if has_words != 0:
                word_ptr = words_ptr + t.to(tl.int64) * _P + _POSITION
                tl.store(word_ptr, tl.load(word_ptr, mask=inside, other=0) - back, mask=inside)
    if back != 0:
        tl.store(lengths_ptr + r, tl.load(lengths_ptr + r) - back.to(tl.int32))
