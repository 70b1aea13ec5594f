"""Draft operations: each checks its arguments, then runs a kernel. Legend: see chunks.py."""

import torch

from qkernels import dispatch
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.drafts import rows
from qkernels.drafts.chunks import DraftChunks, DraftTables, Settled
from qkernels.errors import KernelError
from qkernels.sampling.words import NUM_WORDS

INT64 = (torch.int64,)


def fill_drafts_(
    chunks: DraftChunks,
    tables: DraftTables,
    *,
    page_size: int,
    words_TP: torch.Tensor | None = None,
    fills_tokens: bool = True,
    kernel: str | None = None,
) -> torch.Tensor:
    """Write the tokens that only the device knows; correct positions, slots and lengths.

    The token in column c of a chunk is tokens_NK1[its row, c], except for its known tokens. Returns
    by how much each chunk's positions were too high, int64 [R]. `words_TP` are the sampling
    settings of the rows, if all rows are sampled; their positions are corrected, too. With
    `fills_tokens` False the tokens stay unchanged.
    """
    what = "fill_drafts_"
    _check(what, chunks, tables)
    if words_TP is not None:
        shape = len(chunks.token_ids_T), NUM_WORDS
        check_tensor(f"{what} words", words_TP, shape, INT64, chunks.rows_R)
    run = _run(rows.FILL_DRAFTS, chunks, kernel)
    return run(chunks, tables, page_size=page_size, words_TP=words_TP, fills_tokens=fills_tokens)


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
    kernel: str | None = None,
) -> Settled:
    """Verify a step's drafts against the drawn tokens, and prepare the next `num_drafts` drafts.

    A draft is accepted if it equals the token drawn in the row before it, and all earlier drafts of
    the chunk are accepted. The newest token of each chunk and the number of its rejected drafts are
    written to `tables`. `words_SP` are the sampling settings of the tokens. `tokens_S` None: no row
    is sampled.

    `passes_DK` [D, max_sampled - 1]: True accepts a draft whatever was drawn; such drafts are
    written to `tokens_S`. `accepted_D` is the number of accepted drafts, if it is already known.
    """
    what = "settle_drafts_"
    _check(what, chunks, tables)
    D, like = len(chunks.chunk_D), chunks.rows_R
    if (tokens_S is None) != (words_SP is None) or (tokens_S is None and D):
        raise KernelError(
            what, f"expected tokens and words of {D} chunks, found none", "pass those of the drafts"
        )
    if tokens_S is not None:
        check_tensor(f"{what} tokens", tokens_S, (None,), INT64, like)
        check_tensor(f"{what} words", words_SP, (len(tokens_S), NUM_WORDS), INT64, like)
    if passes_DK is not None:
        shape = D, chunks.max_sampled - 1
        check_tensor(f"{what} passes", passes_DK, shape, (torch.bool,), like)
    if accepted_D is not None:
        check_tensor(f"{what} accepted", accepted_D, (D,), INT64, like)
    run = _run(rows.SETTLE_DRAFTS, chunks, kernel)
    return run(
        *(tokens_S, words_SP, chunks, tables),
        num_drafts=num_drafts,
        page_size=page_size,
        max_model_len=max_model_len,
        passes_DK=passes_DK,
        accepted_D=accepted_D,
    )


def spread_logits(
    logits_DU: torch.Tensor, columns_V: torch.Tensor, kernel: str | None = None
) -> torch.Tensor:
    """Spread logits [D, U] of a draft vocabulary to a larger vocabulary: [D, V].

    Token t takes column columns_V[t], int32, or -inf if that is -1.
    """
    check_float("spread_logits logits", logits_DU)
    expect_ndim("spread_logits logits", logits_DU, 2)
    check_tensor("spread_logits columns", columns_V, (None,), (torch.int32,), logits_DU)
    run = dispatch.implementation(
        rows.SPREAD_LOGITS, device=logits_DU.device.type, dtype=logits_DU.dtype, requested=kernel
    )
    return run(logits_DU, columns_V)


def _check(what: str, chunks: DraftChunks, tables: DraftTables) -> None:
    like, T, R = chunks.rows_R, len(chunks.token_ids_T), len(chunks.rows_R)
    D = len(chunks.chunk_D)
    for name in ("token_ids_T", "positions_T", "slots_T"):
        check_tensor(f"{what} {name}", getattr(chunks, name), (T,), INT64, like)
    for name in ("rows_R", "known_R", "next_R", "capacity_R", "place_R"):
        check_tensor(f"{what} {name}", getattr(chunks, name), (R,), INT64, like)
    for name in ("chunk_D", "first_D", "count_D"):
        check_tensor(f"{what} {name}", getattr(chunks, name), (D,), INT64, like)
    int32 = (torch.int32,)
    for name, least in (("query_starts_R1", R + 1), ("context_lengths_R", R)):
        tensor = getattr(chunks, name)
        check_tensor(f"{what} {name}", tensor, (None,), int32, like)
        if len(tensor) < least:
            raise KernelError(
                f"{what} {name}",
                f"expected {least} or more, found {len(tensor)}",
                "pass longer tensors",
            )
    check_tensor(f"{what} block_tables", chunks.block_tables_RX, (None, None), int32, like)
    N = len(tables.rejected_N)
    check_tensor(f"{what} rejected", tables.rejected_N, (N,), INT64, like)
    check_tensor(f"{what} tokens of tables", tables.tokens_NK1, (N, None), INT64, like)
    if chunks.max_sampled > tables.tokens_NK1.shape[1]:
        found = f"found {chunks.max_sampled} rows that sample"
        width = tables.tokens_NK1.shape[1]
        raise KernelError(
            f"{what} max_sampled",
            f"expected {width} or fewer, {found}",
            "pass the number of rows that sample",
        )


def _run(operation: dispatch.Operation, chunks: DraftChunks, kernel: str | None):
    device = chunks.rows_R.device.type
    return dispatch.implementation(operation, device=device, dtype=torch.int64, requested=kernel)
