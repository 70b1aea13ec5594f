"""ChainDrafter: drafts one token after the other with a head. For EAGLE, EAGLE-3 and MTP.

Row i of the head has position i; its inputs are the state of position i and the token of position
i + 1. Its output predicts the token of position i + 2.

Suffixes of tensor names:

    T: tokens of the step
    D: requests that draft
    K: drafts
    C: hidden size
    V: vocabulary
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from qkernels.attention.cache import PagedKv
from qserve.model.axis_ropes import AxisRopes
from qserve.model.blocks.attention import Attention, StepInputs
from qserve.speculation.draft_step import DraftStep


class ChainHead(Protocol):
    """Interface of a head that drafts one token after the other."""

    attentions: Sequence[Attention]  # attention of the head's layers, in order

    def start(self, step: DraftStep) -> torch.Tensor:
        """Return the first state of each row of the step, [T, C], from the model's states."""

    def __call__(
        self,
        tokens_T: torch.Tensor,
        state_TC: torch.Tensor,
        step: StepInputs,
        caches: list[PagedKv],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head, and write the rows' keys and values.

        Returns (recurrent state, input of `logits`), [T, C] each. `step.embeds` replaces the
        embeddings of some tokens.
        """

    def logits(self, read_DC: torch.Tensor) -> torch.Tensor:
        """Return logits over the model's vocabulary, [D, V]."""


class ChainDrafter:
    """Drafts one token after the other. See DeviceDrafter."""

    looks_ahead = True
    extra_positions = 0

    def __init__(
        self,
        head: ChainHead,
        aux_layers: tuple[int, ...] = (),
        *,
        reads_images: bool = False,
        ropes: AxisRopes | None = None,
        first_kv_heads: tuple[int, ...] | None = None,
    ) -> None:
        """Use a head.

        aux_layers: indices of the target's layers, see DeviceDrafter
        ropes: for a head that was trained with positions of three axes
        first_kv_heads: see DeviceDrafter
        """
        self.head, self.aux_layers, self.attentions = head, aux_layers, head.attentions
        self.reads_images, self._ropes = reads_images, ropes
        self.first_kv_heads = first_kv_heads

    def propose(self, step: DraftStep) -> torch.Tensor:
        return chain(self.head, step.with_ropes(self._ropes), reads_images=self.reads_images)


def chain(head: ChainHead, step: DraftStep, *, reads_images: bool) -> torch.Tensor:
    """Return the drafts, int64 [D, K].

    The first pass runs all rows of the step with the model's true states. Its keys overwrite the
    keys that earlier drafts left in the pages.
    """
    batch = step.first_batch(reads_images=reads_images)
    state_TC, read_TC = head(step.next_tokens_T, head.start(step), batch, step.caches)
    state_DC, read_DC = state_TC[step.last_rows_D], read_TC[step.last_rows_D]
    if not len(step.last_rows_D) or not step.num_drafts:  # kernels require at least one row
        return step.last_rows_D.new_zeros(len(step.last_rows_D), step.num_drafts)
    drafts: list[torch.Tensor] = []
    for index in range(step.num_drafts):
        if index:
            ahead = step.ahead(drafts[-1], index)
            state_DC, read_DC = head(drafts[-1], state_DC, ahead, step.caches)
        drafts.append(step.draw(head.logits(read_DC), index))
    return torch.stack(drafts, 1)
