"""CoveredTokens: how many tokens the states in each slot include, with speculation.

A verification leaves its rows out of the states, since some may be rejected. The next step finds
those it has to apply first by comparing these numbers with its own first positions.
"""

from dataclasses import dataclass, replace

import torch

from qkernels import ops
from qserve.engine.step.device_step import Batch
from qserve.model.blocks.states.state import state_step


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredTokens:
    """One number for each state slot, copied with the states: a Cache of all layers."""

    covered_P: torch.Tensor  # int32
    most_rows: int  # of a verification
    page_tensors: tuple[torch.Tensor, ...] = ()

    @classmethod
    def zeros(cls, num_slots: int, most_rows: int, device: torch.device) -> "CoveredTokens":
        covered_P = torch.zeros(num_slots, dtype=torch.int32, device=device)
        return cls(covered_P=covered_P, most_rows=most_rows)

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """The numbers."""
        return (self.covered_P,)

    def advance_(self, batch: Batch) -> Batch:
        """Return a step with the rows that its states lack; the numbers become those after it."""
        lacking_R = ops.lacking_rows_(self.covered_P, state_step(batch), self.most_rows)
        return replace(batch, lacking_R=lacking_R)
