"""Adapters of one linear in the kernels' layout: a tensor with one slot per adapter.

The matrices are stored by rank: row j of all As of an adapter is contiguous, and so is column j of
all its Bs. An adapter of rank r takes the first r of these rows, so one copy fills a slot.

    L  adapter slots          K  inputs
    R  largest rank           N  outputs of all S linears
    S  fused linears (q, k, v)
    T  rows of x
"""

from dataclasses import dataclass

import torch

NO_ADAPTER = -1  # slot of a row without an adapter
TABLE_COLUMNS = 4  # columns of the tables by slice; 4 make each row 16 bytes, as kernels align


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """Adapter slots of one linear. Elements beyond an adapter's rank are undefined."""

    a_LRSK: torch.Tensor
    b_LRN: torch.Tensor  # B transposed
    ranks_LS: torch.Tensor  # int32 [L, TABLE_COLUMNS]; 0: this linear is not adapted
    scales_LS: torch.Tensor  # float32 [L, TABLE_COLUMNS]
    sizes: tuple[int, ...]  # outputs of each of the S linears

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
