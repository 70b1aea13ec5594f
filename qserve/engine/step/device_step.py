"""Inputs of a step on the device.

T: tokens of the step. R: requests (chunks). S: sampled rows. X: pages of the longest block table.
"""

from dataclasses import dataclass, replace

import torch

from qserve.engine.step.decode_rows import decode_rows
from qserve.engine.step.split_step import split_step
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import to_device
from qserve.model.blocks.attention import InputEmbeds, StepInputs
from qserve.model.cache_spec import SplitRule

ARRAYS = (
    "token_ids_T",
    "positions_T",
    "slots_T",
    "block_tables_RX",
    "query_starts_R1",
    "context_lengths_R",
    "logits_rows_S",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForm:
    """Determines the optional tensors of a model's batches."""

    with_states: bool = False  # True: some layer has a recurrent state
    split_rule: SplitRule | None = None  # None: no step is split
    page_size: int
    # A request with at most so many rows is a decode, and attention computes decodes separately
    # from prompt chunks. 0: it computes all requests in the same way.
    decode_query_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMedia:
    """A drafter's inputs from the images of a step."""

    # Image embeddings of the tokens that follow the step's rows; None: no image token follows.
    # Embeddings of images that are not encoded yet are missing.
    next_embeds: InputEmbeds | None
    positions_AT: torch.Tensor | None  # int64, rotary positions on several axes; None: one axis
    # int64: offset from position to rotary position for the request's later text; None: 0
    text_shifts_T: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(StepInputs):
    """The arrays of StepInput as tensors."""

    token_ids_T: torch.Tensor
    logits_rows_S: torch.Tensor
    adapter_slots_T: torch.Tensor | None = None  # None: no row has an adapter
    # int64: offset from positions_T, after its correction, to rotary positions; None: 0
    rope_shifts_T: torch.Tensor | None = None

    @classmethod
    def of(cls, step: StepInput, device: torch.device, form: BatchForm) -> "Batch":
        """Copy a step to the device without synchronizing."""
        slots_T, shifts_T = step.adapter_slots_T, step.rope_shifts_T
        media_T = step.is_media_T
        states_R = to_device(step.state_slots_R, device) if form.with_states else None
        split = None
        if form.split_rule is not None:
            split = split_step(step, device, form.split_rule, form.page_size)
        return cls(
            **{name: to_device(getattr(step, name), device) for name in ARRAYS},
            state_slots_R=states_R,
            adapter_slots_T=None if slots_T is None else to_device(slots_T, device),
            rope_shifts_T=None if shifts_T is None else to_device(shifts_T, device),
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
            split=split,
            decodes=decode_rows(step, device, form.decode_query_len),
            is_media_T=None if media_T is None else to_device(media_T, device),
        )

    def with_rope_positions(self) -> "Batch":
        """Return the batch with its rotary positions. Call after positions_T is corrected."""
        if self.rope_shifts_T is None:
            return self
        return replace(self, rope_positions_T=self.positions_T + self.rope_shifts_T)

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]
