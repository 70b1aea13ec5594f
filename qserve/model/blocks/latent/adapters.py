"""LoRA adapters of kv_b_proj, the matrix that latent attention absorbs into queries and results.

An adapter adds scale * B A to the matrix. For each head, B has first the rows of the key, then the
rows of the value:

    query + scale * (q_n B_key) A        result + scale * (A latents) B_value

Letters are those of attention.py and qkernels/lora/weights.py; R: adapter rank.
"""

from collections.abc import Iterator

import torch

from qkernels.lora.weights import LoraWeights
from qserve.model.blocks.linear import AdaptedRows


class LatentAdapters:
    """Adapter slots of one layer's kv_b_proj."""

    def __init__(self, weights: LoraWeights, rows: AdaptedRows, nope: int, value: int) -> None:
        self.weights, self.rows, self.nope, self.value = weights, rows, nope, value

    @property
    def slots_T(self) -> torch.Tensor | None:
        """Adapter slot of each row of the running step; None: no row has an adapter."""
        return self.rows.slots_T

    def add_queries_(self, absorbed_THL: torch.Tensor, q_n_THP: torch.Tensor) -> None:
        """Add the adapters' contribution to absorbed queries."""
        for rows_T11, a_RL, b_RHD in self._slots():
            b_RHP = b_RHD[..., : self.nope]
            low_THR = torch.einsum("thp,rhp->thr", q_n_THP.float(), b_RHP) * rows_T11
            absorbed_THL += (low_THR @ a_RL).to(absorbed_THL.dtype)

    def add_results_(self, out_THV: torch.Tensor, out_THL: torch.Tensor) -> None:
        """Add the adapters' contribution to the heads' results, computed from sums of latents."""
        for rows_T11, a_RL, b_RHD in self._slots():
            b_RHV = b_RHD[..., self.nope :]
            low_THR = (out_THL.float() @ a_RL.T) * rows_T11
            out_THV += torch.einsum("thr,rhv->thv", low_THR, b_RHV).to(out_THV.dtype)

    def _slots(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (scale per row, A, B by head) of each slot, in float32.

        The scale is 0 for rows that use another slot. Every slot is computed for all rows, so that
        a CUDA graph has the same kernels for any adapters. Weights beyond an adapter's rank are
        undefined in memory and replaced by 0.
        """
        weights = self.weights
        ranks_R1 = torch.arange(weights.max_rank, device=weights.a_LRSK.device)[:, None]
        for slot in range(weights.num_slots):
            used_R1 = ranks_R1 < weights.ranks_LS[slot, 0]
            a_RL = torch.where(used_R1, weights.a_LRSK[slot, :, 0], 0).float()
            b_RN = torch.where(used_R1, weights.b_LRN[slot], 0).float()
            b_RHD = b_RN.unflatten(1, (-1, self.nope + self.value))
            scale_T = (self.rows.slots_T == slot) * weights.scales_LS[slot, 0]
            yield scale_T[:, None, None], a_RL, b_RHD
