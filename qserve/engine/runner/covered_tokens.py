"""CoveredTokens: number of tokens that the states in each slot include, for speculation.

A verification does not apply its rows to the states, since some rows may be rejected. The next step
compares these numbers with its first positions to find the accepted rows that it must apply first.
"""

from dataclasses import dataclass, replace

import torch

from qkernels import ops
from qserve.engine.step.device_step import Batch
from qserve.model.blocks.states.state import state_step


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredTokens:
    """One token count per state slot. It is a Cache, so it is copied together with the states."""

    covered_P: torch.Tensor  # int32, one count per slot
    most_rows: int  # maximum number of rows of a verification
    page_tensors: tuple[torch.Tensor, ...] = ()

    @classmethod
    def zeros(cls, num_slots: int, most_rows: int, device: torch.device) -> "CoveredTokens":
        covered_P = torch.zeros(num_slots, dtype=torch.int32, device=device)
        return cls(covered_P=covered_P, most_rows=most_rows)

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """The token counts."""
        return (self.covered_P,)

    def advance_(self, batch: Batch) -> Batch:
        """Return the step with `lacking_R`, the number of rows that its states lack.

        Updates the counts to those after the step.
        """
        lacking_R = ops.lacking_rows_(self.covered_P, state_step(batch), self.most_rows)
        return replace(batch, lacking_R=lacking_R)
