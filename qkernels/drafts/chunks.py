"""Arguments and results of the draft operations of one step.

T  rows of the step                    N  rows of the tables
R  chunks of the step                  K  drafts
S  rows that are sampled               X  pages of a block table
D  chunks with sampled rows            P  words of sampling settings
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

# Drafts are drawn without penalties, biases and grammars; the model's verification applies them.
NEUTRAL = {
    HISTORY_ROW: -1,
    NUM_LOGPROBS: -1,
    MASK_START: -1,
    BIAS_START: 0,
    BIAS_END: 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChunks:
    """The chunks of one step. Rows of a chunk are adjacent; the last ones are sampled.

    Everything after R chunks, or after their rows, is padding.
    """

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    slots_T: torch.Tensor  # int64, -1: not written
    context_lengths_R: torch.Tensor  # int32
    query_starts_R1: torch.Tensor  # int32
    block_tables_RX: torch.Tensor  # int32
    rows_R: torch.Tensor  # int64: each chunk's row of the tables
    # int64: number of the chunk's first tokens that are already in token_ids. 0: the chunk's
    # positions are too high by the rejected drafts of its last verification
    known_R: torch.Tensor
    next_R: torch.Tensor  # int64: the token after a chunk without sampled rows
    capacity_R: torch.Tensor  # int64: number of positions that the chunk's pages hold
    place_R: torch.Tensor  # int64: the chunk's index in D; -1: no row is sampled
    chunk_D: torch.Tensor  # int64: the chunk's index in R
    first_D: torch.Tensor  # int64: index in S of the chunk's first sampled row
    count_D: torch.Tensor  # int64: number of the chunk's sampled rows
    max_sampled: int  # the largest of these numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTables:
    """State of requests that lasts from step to step."""

    tokens_NK1: torch.Tensor  # int64: each request's newest token, then its drafts
    rejected_N: torch.Tensor  # int64: number of rejected drafts of its last verification


class DraftPositions(NamedTuple):
    """Positions and KV slots of the K draft rows after each chunk with sampled rows."""

    positions_KD: torch.Tensor  # int64
    slots_KD: torch.Tensor  # int64, -1: beyond the request's pages
    lengths_KD: torch.Tensor  # int32: keys that the row sees, limited by the request's pages


class Settled(NamedTuple):
    """Verification result of a step's drafts, and the inputs of the next drafts."""

    for_host: torch.Tensor  # int64 [S + D]: all tokens, then the number of output tokens per chunk
    next_tokens_T: torch.Tensor  # int64: the token after each row, if it is known
    last_rows_D: torch.Tensor  # int64: index in T of the row before the chunk's newest token
    rows_D: torch.Tensor  # int64: the chunk's row of the tables
    # int64: sampling settings of each draft: those of the newest token, at the draft's position
    words_KDP: torch.Tensor
    draft_positions: DraftPositions  # rows after last_rows_D

    @property
    def emitted_D(self) -> torch.Tensor:
        """Number of output tokens of each chunk with sampled rows."""
        return self.for_host[len(self.for_host) - len(self.last_rows_D) :]
