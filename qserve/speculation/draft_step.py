"""DraftStep: what a device drafter is given of a step, on the device. Knows no requests.

Legend: T tokens of the step, C hidden size, D requests that draft, X longest block table, K drafts,
V vocabulary.
"""

from dataclasses import dataclass

import torch

from qkernels.attention.cache import PagedKv
from qkernels.drafts.chunks import DraftPlaces
from qserve.engine.batch import Batch
from qserve.speculation.draws import Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """A step that the model has computed and whose tokens are drawn.

    Rows of a verify that was refused stand in `batch` as they were: what is computed of them lies
    beyond the request's end and is overwritten.
    """

    batch: Batch  # the model's own: tokens, positions, slots of the T rows, and their requests
    hidden_TC: torch.Tensor  # after the model's last norm: what its head reads
    taps: tuple[torch.Tensor, ...]  # [T, C] for each layer that the drafter asks for
    next_tokens_T: torch.Tensor  # int64: the token behind each row, as far as it is settled
    last_rows_D: torch.Tensor  # int64, of T: the row that each request's newest token follows
    tables_DX: torch.Tensor  # int32: the pages of the requests that draft
    starts_D1: torch.Tensor  # int32: 0, 1 .. D
    places: DraftPlaces  # of the rows behind last_rows_D
    num_drafts: int  # K
    max_context_len: int  # at most so many keys, drafts included, as far as there are pages
    caches: list[PagedKv]  # of the drafter's layers
    draws: Draws

    @property
    def tokens_D(self) -> torch.Tensor:
        """The newest token of each request that drafts: no row of the step was its own."""
        return self.next_tokens_T[self.last_rows_D]

    def ahead(self, tokens_D: torch.Tensor, count: int) -> Batch:
        """A step of one row for each request that drafts, at `count` positions after last_rows_D.

        With count 1 the row of the newest token, with 2 that of the first draft, and so on. A row
        without a place in the request's pages is written nowhere.
        """
        positions_KD, slots_KD, lengths_KD = self.places
        return Batch(
            token_ids_T=tokens_D,
            positions_T=positions_KD[count - 1],
            slots_T=slots_KD[count - 1],
            block_tables_RX=self.tables_DX,
            query_starts_R1=self.starts_D1,
            context_lengths_R=lengths_KD[count - 1],
            logits_rows_S=self.starts_D1[:-1],
            max_query_len=1,
            max_context_len=self.max_context_len,
        )

    def draw(self, logits_DV: torch.Tensor, index: int) -> torch.Tensor:
        """The draft number `index` (0 the first) of each request, int64 [D], from its logits.

        With the request's temperature, filters and noise of that position, so that the model is
        likely to draw the same. Logits are of the model's vocabulary, -inf where a drafter has no
        such token.
        """
        return self.draws.draw(logits_DV, index)
