"""SelectedKeys: the slots of the keys that an indexer selects for each row.

Legend: T rows of a step, S most keys that a row sees.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedKeys:
    """Slots of the keys that each row sees, by position."""

    slots_TS: torch.Tensor  # int32; slots beyond a row's count are 0
    # int32, 1 to S; rows that belong to no request see the key in slot 0
    counts_T: torch.Tensor
