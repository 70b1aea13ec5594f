"""Chain of drafts from a head with keys and values: the drafter of EAGLE, EAGLE-3 and MTP.

Row i holds the state of position i and the token of position i + 1, at position i; its output
predicts the token of position i + 2. Legend: T tokens of the step, D requests that draft, K drafts,
C hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from qkernels.attention.cache import PagedKv
from qserve.model.axis_ropes import AxisRopes
from qserve.model.blocks.attention import Attention, StepInputs
from qserve.speculation.draft_step import DraftStep


class ChainHead(Protocol):
    """Interface of a head that drafts a chain."""

    attentions: Sequence[Attention]  # of its layers, in order

    def start(self, step: DraftStep) -> torch.Tensor:
        """The first state [T, C] of each of the step's rows, from the model's own states."""

    def __call__(
        self,
        tokens_T: torch.Tensor,
        state_TC: torch.Tensor,
        step: StepInputs,
        caches: list[PagedKv],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(recurrent state, input of `logits`) [T, C]; writes the rows' keys and values.

        `step.embeds` replaces embeddings of some tokens.
        """

    def logits(self, read_DC: torch.Tensor) -> torch.Tensor:
        """Logits [D, V] over the model's vocabulary."""


class ChainDrafter:
    """Drafts a chain. See DeviceDrafter."""

    looks_ahead = True
    places_after = 0

    def __init__(
        self,
        head: ChainHead,
        taps: tuple[int, ...] = (),
        *,
        reads_images: bool = False,
        ropes: AxisRopes | None = None,
    ) -> None:
        """`taps`: layers of the auxiliary hidden states. `ropes`: of a head that was trained on
        positions of three axes.
        """
        self.head, self.taps, self.attentions = head, taps, head.attentions
        self.reads_images, self._ropes = reads_images, ropes

    def propose(self, step: DraftStep) -> torch.Tensor:
        return chain(self.head, step.with_ropes(self._ropes), reads_images=self.reads_images)


def chain(head: ChainHead, step: DraftStep, *, reads_images: bool) -> torch.Tensor:
    """Drafts int64 [D, K].

    The first pass covers all of the step's rows: it overwrites, from the model's true states, the
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
