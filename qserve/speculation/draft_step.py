"""DraftStep: inputs of a device drafter for one step.

Suffixes of tensor names:

    T: tokens of the step
    C: hidden size
    D: requests that draft
    X: longest block table
    K: drafts
    B: rows of a block
    V: vocabulary
"""

from dataclasses import dataclass, replace

import torch

from qkernels.drafts.chunks import DraftPositions
from qserve.engine.step.device_step import Batch, DraftMedia
from qserve.model.axis_ropes import AxisRopes
from qserve.model.cache_spec import Cache
from qserve.speculation.draws import Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """A step after the model's forward pass and sampling.

    `batch` still has the rows of rejected drafts. Keys that these rows write are beyond the
    request's end, and are overwritten later.
    """

    batch: Batch  # the model's batch: tokens, positions, slots of the T rows, and their requests
    hidden_TC: torch.Tensor  # hidden states after the model's last norm
    aux_states: tuple[
        torch.Tensor, ...
    ]  # auxiliary hidden states [T, C], see DeviceDrafter.aux_layers
    next_tokens_T: torch.Tensor  # int64: the token after each row, as far as it is known
    last_rows_D: torch.Tensor  # int64: index (into T) of the row before a request's newest token
    tables_DX: torch.Tensor  # int32: block tables of the requests that draft
    starts_D1: torch.Tensor  # int32: 0, 1 .. D
    draft_positions: DraftPositions  # of K + extra_positions rows after last_rows_D
    num_drafts: int  # K
    max_context_len: int  # upper bound of the number of keys, including drafts
    caches: list[Cache]  # caches of the drafter's layers
    draws: Draws
    media: DraftMedia | None = None  # images of the step; None: no images
    ropes: AxisRopes | None = None  # for a drafter whose positions have three axes

    def with_ropes(self, ropes: AxisRopes | None) -> "DraftStep":
        """Return the step with `ropes`, for a drafter whose positions have three axes."""
        return replace(self, ropes=ropes)

    def first_batch(self, *, reads_images: bool) -> Batch:
        """Return the model's batch for a drafter that reads the token after each row.

        `reads_images`: the drafter reads embeddings of images instead of their placeholder token.
        """
        media, batch = self.media, self.batch
        if media is not None and reads_images:
            batch = replace(batch, embeds=media.next_embeds)
        if self.ropes is None:
            return batch
        if media is not None and media.positions_AT is not None:
            return replace(batch, row_ropes=self.ropes.of(media.positions_AT))
        return batch.with_rope_positions()

    @property
    def tokens_D(self) -> torch.Tensor:
        """The newest token of each request that drafts. It is not in a row of the step."""
        return self.next_tokens_T[self.last_rows_D]

    def ahead(self, tokens_D: torch.Tensor, count: int) -> Batch:
        """Return a batch with one row per request that drafts, `count` positions after last_rows_D.

        `count` 1 is the row of the newest token, 2 the row of the first draft, and so on. Rows
        without a slot in the request's pages write no keys.
        """
        positions_KD, slots_KD, lengths_KD = self.draft_positions
        positions_D = positions_KD[count - 1]
        # Without media, the row before the newest token is text.
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
        """Return a batch with B rows per request that drafts, starting with the newest token.

        The batch treats each row as a request with one row. So rows can attend to later rows:
        without `is_causal`, to the whole block. In this case, `fold` rows, which attend to the same
        keys, form one request and read the keys once. Rows without a slot in the request's pages
        write no keys.
        """
        B, D = tokens_BD.shape
        positions_BD, slots_BD, lengths_BD = (each[:B] for each in self.draft_positions)
        # Positions stop at a request's last one. Only the first row at that position writes keys.
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
        """Sample all drafts of each request. Returns int64 [D, K]. See `draw`."""
        return self.draws.draw_all(logits_KDV).T.contiguous()

    def draw(self, logits_DV: torch.Tensor, index: int) -> torch.Tensor:
        """Sample draft number `index` (from 0) of each request from its logits. Returns int64 [D].

        Uses the request's temperature and filters, and the noise of the position, so that the model
        will probably sample the same token. Logits are over the model's vocabulary, with -inf for
        tokens that the drafter lacks.
        """
        return self.draws.draw(logits_DV, index)
