"""What the model's pass of a step leaves on the device. Knows no requests."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """Legend: T tokens of the step, S rows that sample, C hidden size, V vocabulary."""

    logits_SV: torch.Tensor  # of the rows that sample
    hidden_TC: torch.Tensor | None  # after the last norm; None: nobody reads it
    taps: tuple[torch.Tensor, ...] = ()  # [T, C] residual streams, which a drafter asks for
