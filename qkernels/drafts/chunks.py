"""Arguments and results of the drafts' operations for one step.

Legend: T rows of the step, R chunks of it, S rows that sample, D chunks that sample, N rows of the
tables, K drafts, X pages of a block table, P words of sampling.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from qkernels.sampling.words import (
    BIAS_END,
    BIAS_START,
    HISTORY_ROW,
    MASK_START,
    NUM_LOGPROBS,
)

# Drafts are drawn without token counts, biases and grammars; the model's verify applies them.
NEUTRAL = {
    HISTORY_ROW: -1,
    NUM_LOGPROBS: -1,
    MASK_START: -1,
    BIAS_START: 0,
    BIAS_END: 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChunks:
    """A step. The rows of a chunk are adjacent; the last ones sample.

    Everything after R chunks, or after their rows, is padding.
    """

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    slots_T: torch.Tensor  # int64, -1: written nowhere
    context_lengths_R: torch.Tensor  # int32
    query_starts_R1: torch.Tensor  # int32
    block_tables_RX: torch.Tensor  # int32
    rows_R: torch.Tensor  # int64: each chunk's row of the tables
    # int64: so many of its first tokens are in token_ids already. 0: its positions are too high
    # by the rejected drafts of its last verify
    known_R: torch.Tensor
    next_R: torch.Tensor  # int64: the token after a chunk that does not sample
    capacity_R: torch.Tensor  # int64: positions that its pages hold
    place_R: torch.Tensor  # int64: which of D it is; -1: it does not sample
    chunk_D: torch.Tensor  # int64, of R
    first_D: torch.Tensor  # int64, of S: the first of its rows that sample
    count_D: torch.Tensor  # int64: how many there are
    most_sampled: int  # the largest of them


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTables:
    """State that lasts from step to step."""

    tokens_NK1: torch.Tensor  # int64: each request's newest token, and its drafts
    refused_N: torch.Tensor  # int64: drafts of its last verify that came to nothing


class DraftPlaces(NamedTuple):
    """Positions and pages of the rows after a step: one per sampling chunk and each of K drafts."""

    positions_KD: torch.Tensor  # int64
    slots_KD: torch.Tensor  # int64, -1: its pages have no place for it
    lengths_KD: torch.Tensor  # int32: keys that it sees, as far as there are pages


class Settled(NamedTuple):
    """Verification result of a step's drafts, and the inputs of the next drafts."""

    told: torch.Tensor  # int64 [S + D]: for the host: all tokens, and how many of each are output
    next_tokens_T: torch.Tensor  # int64: the token after each row, as far as it is settled
    last_rows_D: torch.Tensor  # int64, of T: the row that each one's newest token follows
    rows_D: torch.Tensor  # int64: each one's row of the tables
    # int64 [K, D, P]: how each draft is drawn: as the newest token, one position on for each
    words_KDP: torch.Tensor
    places: DraftPlaces  # after last_rows

    @property
    def emitted_D(self) -> torch.Tensor:
        """How many tokens of each chunk that samples are output."""
        return self.told[len(self.told) - len(self.last_rows_D) :]
