"""DraftStep: what a device drafter is given of a step, on the device. Knows no requests.

Legend: T tokens of the step, C hidden size, D requests that draft, X longest block table, K drafts,
V vocabulary.
"""

from dataclasses import dataclass

import torch

from qkernels.attention.cache import PagedKv
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
    requests_D: torch.Tensor  # int64, of the step's requests: which ones draft
    capacity_D: torch.Tensor  # int64: positions that each one's pages hold
    num_drafts: int  # K
    max_model_len: int  # no position is as large
    max_context_len: int  # at most so many keys, drafts included
    page_size: int
    caches: list[PagedKv]  # of the drafter's layers
    draws: Draws

    @property
    def tokens_D(self) -> torch.Tensor:
        """The newest token of each request that drafts: no row of the step was its own."""
        return self.next_tokens_T[self.last_rows_D]

    @property
    def positions_D(self) -> torch.Tensor:
        """The position of the row that it follows; its own is one more."""
        return self.batch.positions_T[self.last_rows_D]

    def ahead(self, tokens_D: torch.Tensor, count: int) -> Batch:
        """A step of one row for each request that drafts, at `count` positions after last_rows_D.

        With count 1 the row of the newest token, with 2 that of the first draft, and so on. A row
        without a place in the request's pages is written nowhere.
        """
        positions_D = self.positions_D + count
        tables_DX = self.batch.block_tables_RX[self.requests_D]
        has_place_D = positions_D < self.capacity_D
        positions_D = positions_D.clamp(max=self.max_model_len - 1)
        index_D1 = (positions_D // self.page_size).clamp(max=tables_DX.shape[1] - 1)[:, None]
        pages_D = tables_DX.gather(1, index_D1)[:, 0].long()
        slots_D = pages_D * self.page_size + positions_D % self.page_size
        rows = torch.arange(len(tokens_D) + 1, device=tokens_D.device)
        # without a place for this row the keys end where the pages do
        lengths_D = torch.minimum(positions_D + 1, self.capacity_D)
        return Batch(
            token_ids_T=tokens_D,
            positions_T=positions_D,
            slots_T=torch.where(has_place_D, slots_D, -1),
            block_tables_RX=tables_DX,
            query_starts_R1=rows.to(torch.int32),
            context_lengths_R=lengths_D.to(torch.int32),
            logits_rows_S=rows[:-1],
            max_query_len=1,
            # what has no place in the pages is not there to be seen
            max_context_len=min(self.max_context_len, tables_DX.shape[1] * self.page_size),
        )

    def draw(self, logits_DV: torch.Tensor, index: int) -> torch.Tensor:
        """The draft number `index` (0 the first) of each request, int64 [D], from its logits.

        With the request's temperature, filters and noise of that position, so that the model is
        likely to draw the same. Logits are of the model's vocabulary, -inf where a drafter has no
        such token.
        """
        return self.draws.draw(logits_DV, index)
