"""Filling and settling drafts, computed by hand, and arguments that are refused."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.sampling.words import HISTORY_ROW, MASK_START, NUM_WORDS, POSITION
from tests.qkernels.draft_case import draft_case

CPU = torch.device("cpu")
SIZES = {"num_drafts": 2, "page_size": 4, "max_model_len": 100}


def a_verify():
    """Tokens 5 6 7 8 at positions 10 .. 13 on pages 3, 1, 9, 2 of 4; the request's row is 4."""
    chunks, tables, _, _ = draft_case([(4, 4, 0)], CPU, padding=0)
    chunks = replace(
        chunks,
        token_ids_T=torch.tensor([5, 6, 7, 8]),
        positions_T=torch.arange(10, 14),
        slots_T=torch.tensor([38, 39, 8, 9]),
        context_lengths_R=torch.tensor([14], dtype=torch.int32),
        block_tables_RX=torch.tensor([[3, 1, 9, 2]], dtype=torch.int32),
        rows_R=torch.tensor([4]),
        capacity_R=torch.tensor([16]),
    )
    tables.tokens_NK1[4] = torch.tensor([90, 91, 92, 93])
    tables.rejected_N[4] = 3
    return chunks, tables


def test_fill_drafts_writes_tokens_and_positions():
    chunks, tables = a_verify()
    words = torch.arange(4 * NUM_WORDS).view(4, NUM_WORDS)
    before = words.clone()
    back = ops.fill_drafts_(chunks, tables, page_size=4, words_TP=words)
    assert back.tolist() == [3]
    assert chunks.token_ids_T.tolist() == [90, 91, 92, 93]
    assert chunks.positions_T.tolist() == [7, 8, 9, 10]
    assert chunks.slots_T.tolist() == [1 * 4 + 3, 9 * 4, 9 * 4 + 1, 9 * 4 + 2]
    assert chunks.context_lengths_R.tolist() == [11]
    before[:, POSITION] -= 3
    assert torch.equal(words, before)


# drawn -> accepted drafts (of 6, 7, 8), the newest token
DRAWN = {(6, 7, 8, 9): (3, 9), (6, 7, 1, 2): (2, 1), (6, 1, 8, 2): (1, 1), (-1, 7, 8, 9): (0, 0)}


@pytest.mark.parametrize("drawn", DRAWN)
def test_drafts_are_accepted_up_to_the_first_mismatch(drawn):
    chunks, tables = a_verify()
    words = torch.arange(4 * NUM_WORDS).view(4, NUM_WORDS)
    settled = ops.settle_drafts_(torch.tensor(drawn), words, chunks, tables, **SIZES)
    accepted, newest = DRAWN[drawn]
    assert settled.for_host.tolist() == [*drawn, accepted + 1]
    assert settled.next_tokens_T.tolist() == [max(0, token) for token in drawn]
    assert settled.last_rows_D.tolist() == [accepted] and settled.rows_D.tolist() == [4]
    assert tables.tokens_NK1[4].tolist() == [newest, 91, 92, 93]
    assert tables.rejected_N[4] == 3 - accepted
    places, last = settled.draft_positions, 10 + accepted
    assert places.positions_KD[:, 0].tolist() == [last + 1, last + 2]
    # pages end at 16
    slots = {11: 39, 12: 8, 13: 9, 14: 10, 15: 11}
    assert places.slots_KD[:, 0].tolist() == [slots.get(last + k, -1) for k in (1, 2)]
    assert places.lengths_KD[:, 0].tolist() == [min(last + k + 1, 16) for k in (1, 2)]
    for k in range(2):
        row = settled.words_KDP[k, 0]
        assert row[POSITION] == words[accepted, POSITION] + 1 + k
        assert row[HISTORY_ROW] == row[MASK_START] == -1
        assert row[0] == words[accepted, 0]


def test_invalid_arguments_are_refused():
    chunks, tables = a_verify()
    words = torch.zeros(4, NUM_WORDS, dtype=torch.int64)
    with pytest.raises(KernelError, match="expected tokens and words of 1 chunks"):
        ops.settle_drafts_(None, None, chunks, tables, **SIZES)
    with pytest.raises(KernelError, match="passes: expected .1, 3., found .1, 2."):
        passes = torch.ones(1, 2, dtype=torch.bool)
        ops.settle_drafts_(torch.arange(4), words, chunks, tables, passes_DK=passes, **SIZES)
    with pytest.raises(KernelError, match="expected 4 or fewer, found 5 rows that sample"):
        ops.fill_drafts_(replace(chunks, max_sampled=5), tables, page_size=4)
    with pytest.raises(KernelError, match="slots_T: expected .4., found .3."):
        ops.fill_drafts_(replace(chunks, slots_T=chunks.slots_T[:3]), tables, page_size=4)
