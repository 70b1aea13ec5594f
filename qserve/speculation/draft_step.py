"""DraftStep: inputs of a device drafter for one step.

Legend: T tokens of the step, C hidden size, D requests that draft, X longest block table, K drafts,
B rows of a block, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch

from qkernels.drafts.chunks import DraftPlaces
from qserve.engine.step.device_step import Batch, DraftMedia
from qserve.model.axis_ropes import AxisRopes
from qserve.model.cache_spec import Cache
from qserve.speculation.draws import Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """A step that the model has computed and sampled.

    `batch` still contains the rows of rejected drafts: their results are beyond the request's end
    and are overwritten.
    """

    batch: Batch  # the model's own: tokens, positions, slots of the T rows, and their requests
    hidden_TC: torch.Tensor  # after the model's last norm: the input of its head
    taps: tuple[torch.Tensor, ...]  # auxiliary hidden states [T, C] that the drafter asks for
    next_tokens_T: torch.Tensor  # int64: the token after each row, as far as it is known
    last_rows_D: torch.Tensor  # int64, of T: the row before each request's newest token
    tables_DX: torch.Tensor  # int32: block tables of the requests that draft
    starts_D1: torch.Tensor  # int32: 0, 1 .. D
    places: DraftPlaces  # of the rows after last_rows_D: K, and the drafter's places_after
    num_drafts: int  # K
    max_context_len: int  # upper bound of the keys, drafts included
    caches: list[Cache]  # of the drafter's layers
    draws: Draws
    media: DraftMedia | None = None  # images of the step; None: it has none
    ropes: AxisRopes | None = None  # of a drafter whose positions have three axes

    def with_ropes(self, ropes: AxisRopes | None) -> "DraftStep":
        """Return the step for a drafter that rotates by the positions of three axes."""
        return replace(self, ropes=ropes)

    def first_batch(self, *, reads_images: bool) -> Batch:
        """The model's batch with the inputs of a drafter that reads the token after each row.

        `reads_images`: it reads the embedding of an image instead of its placeholder's.
        """
        media, batch = self.media, self.batch
        if media is not None and reads_images:
            batch = replace(batch, embeds=media.next_embeds)
        if self.ropes is None:
            return batch
        if media is not None and media.positions_3T is not None:
            return replace(batch, row_ropes=self.ropes.of(media.positions_3T))
        return batch.with_rope_positions()

    @property
    def tokens_D(self) -> torch.Tensor:
        """The newest token of each request that drafts; no row of the step contains it."""
        return self.next_tokens_T[self.last_rows_D]

    def ahead(self, tokens_D: torch.Tensor, count: int) -> Batch:
        """A step of one row per request that drafts, at `count` positions after last_rows_D.

        Count 1 is the row of the newest token, 2 that of the first draft, and so on. A row without
        a slot in the request's pages is not written.
        """
        positions_KD, slots_KD, lengths_KD = self.places
        positions_D = positions_KD[count - 1]
        # Without media the row before the newest token is text.
        shifts_T = self.batch.rope_shifts_T if self.media is None else self.media.text_shifts_T
        is_shifted = self.ropes is not None and shifts_T is not None
        return Batch(
            token_ids_T=tokens_D,
            positions_T=positions_D,
            rope_positions_T=positions_D + shifts_T[self.last_rows_D] if is_shifted else None,
            slots_T=slots_KD[count - 1],
            block_tables_RX=self.tables_DX,
            query_starts_R1=self.starts_D1,
            context_lengths_R=lengths_KD[count - 1],
            logits_rows_S=self.starts_D1[:-1],
            max_query_len=1,
            max_context_len=self.max_context_len,
        )

    def block(self, tokens_BD: torch.Tensor, *, is_causal: bool, fold: int = 1) -> Batch:
        """A step of B rows per request that drafts, row by row: the newest token's first.

        Each row is a request of its own with one row, so that a row can see keys after its own:
        without `is_causal`, those of the whole block. Then `fold` rows, which see the same keys,
        are one request and read them once. A row without a slot in the request's pages is not
        written.
        """
        B, D = tokens_BD.shape
        positions_BD, slots_BD, lengths_BD = (each[:B] for each in self.places)
        # positions end at the last one of a request: its slot belongs to the first row there
        is_new_BD = positions_BD[1:] > positions_BD[:-1]
        slots_BD = torch.cat([slots_BD[:1], torch.where(is_new_BD, slots_BD[1:], -1)])
        if not is_causal:
            lengths_BD = lengths_BD[-1].expand(B // fold, D)
        num_requests = lengths_BD.numel()
        starts = torch.arange(num_requests + 1, dtype=torch.int32, device=tokens_BD.device)
        return Batch(
            token_ids_T=tokens_BD.flatten(),
            positions_T=positions_BD.flatten(),
            slots_T=slots_BD.flatten(),
            block_tables_RX=self.tables_DX.repeat(num_requests // D, 1),
            query_starts_R1=starts,
            context_lengths_R=lengths_BD.flatten().contiguous(),
            logits_rows_S=starts[:-1],
            max_query_len=1,
            max_context_len=self.max_context_len,
            folded_rows=fold,
        )

    def draw_all(self, logits_KDV: torch.Tensor) -> torch.Tensor:
        """Sample all drafts of each request, int64 [D, K]. See `draw`."""
        return self.draws.draw_all(logits_KDV).T.contiguous()

    def draw(self, logits_DV: torch.Tensor, index: int) -> torch.Tensor:
        """Sample draft number `index` (0 is the first) of each request from its logits, int64 [D].

        Uses the request's temperature, filters and noise of that position, so that the model
        probably samples the same token. Logits cover the model's vocabulary; -inf for tokens that a
        drafter lacks.
        """
        return self.draws.draw(logits_DV, index)
