"""The adapters of one linear in the kernels' layout: slots of one memory, and each row's slot.

An adapter's matrices are cut by rank: row j of all its As and column j of all its Bs are adjacent.
So an adapter of rank r is the first r such pieces, and one copy fills a slot.

Legend: L slots, R the largest rank, S linears side by side (q, k, v), K inputs, N outputs of all S,
T rows of x.
"""

from dataclasses import dataclass

import torch

NO_ADAPTER = -1  # instead of a row's slot
TABLE_COLUMNS = 4  # of slices; 16 bytes, as kernels want addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """Slots of adapters of one linear. Elements beyond a slice's rank are undefined."""

    a_LRSK: torch.Tensor
    b_LRN: torch.Tensor  # B transposed
    ranks_LS: torch.Tensor  # int32 [L, TABLE_COLUMNS]; 0: this linear is not adapted
    scales_LS: torch.Tensor  # float32 [L, TABLE_COLUMNS]
    sizes: tuple[int, ...]  # outputs of each of the S

    @property
    def num_slots(self) -> int:
        return self.a_LRSK.shape[0]

    @property
    def max_rank(self) -> int:
        return self.a_LRSK.shape[1]

    @property
    def num_slices(self) -> int:
        return len(self.sizes)

    @property
    def in_features(self) -> int:
        return self.a_LRSK.shape[3]

    @property
    def out_features(self) -> int:
        return self.b_LRN.shape[2]
