"""P-EAGLE head as a torch module, for training and calibration (arXiv 2602.01469).

EAGLE-3's layers run once for all drafts. Rows whose token is not known yet get a mask token and a
learned state.

Legend:
B: windows, S: tokens of a window, A: anchors, K: drafts, M: K - 1 mask rows of an anchor
F: inputs of `fc`, V: target vocabulary, U: draft vocabulary
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from calibrate.heads.eagle3 import Eagle3Module
from calibrate.heads.losses import cross_entropy, weights_after
from formats.heads import tensors as names
from formats.heads.config import EagleConfig


class ParallelModule(Eagle3Module):
    """P-EAGLE head; `state_dict()` has the names of formats/heads/tensors.py."""

    def __init__(
        self, config: EagleConfig, embedding_VC: torch.Tensor, present: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(config, embedding_VC, present)
        self.mask_hidden = nn.Parameter(0.1 * torch.randn(names.fc_inputs(config)))

    def parallel(
        self, ids_BS: torch.Tensor, aux_BSF: torch.Tensor, anchors_A: torch.Tensor, num_drafts: int
    ) -> Iterator[torch.Tensor]:
        """Yield the logits of each draft d: [B, S - 1, U] for d = 0, then [B, A, U].

        Row i predicts token i + 2. K - 1 mask rows follow each anchor row i. They attend to the
        rows up to the anchor, and to the anchor's earlier mask rows. Mask row d of an anchor
        predicts token i + 2 + d.
        """
        B, S = ids_BS.shape
        A, M, device = len(anchors_A), num_drafts - 1, ids_BS.device
        ids = torch.cat(
            [ids_BS[:, 1:], ids_BS.new_full((B, 1 + A * M), self.config.mask_token_id)], 1
        )
        masks = self.mask_hidden.to(aux_BSF.dtype).expand(B, A * M, -1)
        state = self.fused(torch.cat([aux_BSF, masks], 1))
        embedded = functional.embedding(ids, self.embedding[0]).to(state.dtype)
        row_S = torch.arange(S, device=device)
        depth = torch.cat(
            [torch.zeros_like(row_S), torch.arange(1, M + 1, device=device).repeat(A)]
        )
        anchor = torch.cat([row_S, anchors_A.repeat_interleave(M)])
        before = (depth == 0) & (anchor[:, None] >= anchor)
        own = (anchor[:, None] == anchor) & (depth[:, None] >= depth)
        cos_sin = self.rotary(state, (anchor + depth)[None])
        for layer in self.layers:
            state = layer(state, embedded, cos_sin, [], before | own)
        read = self.norm(state)
        yield self.lm_head(read[:, : S - 1])
        for draft in range(M):
            yield self.lm_head(read[:, S + draft :: M])


def parallel_losses(
    head: ParallelModule,
    ids_BS: torch.Tensor,
    aux_BSF: torch.Tensor,
    target_BSV: torch.Tensor,
    anchors_A: torch.Tensor,
    *,
    num_drafts: int,
    draft_ids_U: torch.Tensor | None = None,
    after_errors: float = 1.0,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (loss, accuracy) of each draft, as `step_losses` does.

    The first draft is judged at all rows, later drafts only at the anchors. `after_errors`: weight
    of the losses at an anchor after its first draft that is not the text's token.
    """
    drafts = head.parallel(ids_BS, aux_BSF, anchors_A, num_drafts)
    weights_BA = torch.ones(len(ids_BS), len(anchors_A), device=ids_BS.device)
    for draft, logits in enumerate(drafts):
        if draft == 0:
            yield cross_entropy(logits, target_BSV[:, 1:], draft_ids_U)
            logits = logits[:, anchors_A]
        else:
            target_BAV = target_BSV[:, anchors_A + 1 + draft]
            yield cross_entropy(logits, target_BAV, draft_ids_U, weights_BA)
        ids_BA = ids_BS[:, anchors_A + 2 + draft]
        weights_BA = weights_after(weights_BA, logits, ids_BA, draft_ids_U, after_errors)
