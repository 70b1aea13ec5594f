"""Adapters of a layer's experts in the kernels' layout, and the adapter of each token of a step.

As in qkernels/lora/weights.py, matrices are stored by rank: row j of all As of an adapter is
contiguous, and so is column j of all its Bs. The ranks of an adapter are those of its largest
expert; the others have zeros beyond their own ranks.

    L  adapter slots          K  inputs
    R  largest rank           N  outputs of all S linears
    E  experts                M  tokens
    S  fused linears: gate and up, or one
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLora:
    """Adapter slots of one product of a layer's experts.

    Elements beyond an adapter's rank are undefined.
    """

    a_LRESK: torch.Tensor
    b_LREN: torch.Tensor  # B transposed; outputs of gate, then of up
    ranks_LS: torch.Tensor  # int32 [L, TABLE_COLUMNS]; 0: this linear is not adapted
    scales_LS: torch.Tensor  # float32 [L, TABLE_COLUMNS]
    sizes: tuple[int, ...]  # outputs of each of the S linears; all are equal

    @property
    def num_slots(self) -> int:
        return self.a_LRESK.shape[0]

    @property
    def max_rank(self) -> int:
        return self.a_LRESK.shape[1]

    @property
    def num_experts(self) -> int:
        return self.a_LRESK.shape[2]

    @property
    def num_slices(self) -> int:
        return len(self.sizes)

    @property
    def in_features(self) -> int:
        return self.a_LRESK.shape[4]

    @property
    def out_features(self) -> int:
        return self.b_LREN.shape[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAdapters:
    """Adapters of both products of a layer's experts, and the adapter slot of each token."""

    gate_up: ExpertLora
    down: ExpertLora
    slots_M: torch.Tensor  # int32; -1: no adapter
