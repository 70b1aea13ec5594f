"""Spread the logits of a draft vocabulary to the model's vocabulary, in Triton.

Legend: D rows, U draft vocabulary, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device

BLOCK = 1024


def spread_logits(logits_DU: torch.Tensor, columns_V: torch.Tensor) -> torch.Tensor:
    """Implement ops.spread_logits."""
    logits_DU = logits_DU.contiguous()
    D, V = len(logits_DU), len(columns_V)
    spread_DV = logits_DU.new_empty(D, V)
    if D:
        with on_device(logits_DU):
            launch(
                _spread_logits,
                (ceil_div(V, BLOCK), D),
                logits_DU,
                columns_V,
                spread_DV,
                logits_DU.shape[1],
                V,
                BLOCK=BLOCK,
                num_warps=4,
            )
    return spread_DV


@triton.jit
def _spread_logits(
    logits_ptr,  # [D, U]
    columns_ptr,  # [V], -1: none
    spread_ptr,  # [D, V]
    U,
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    column = tl.load(columns_ptr + token, mask=inside, other=-1)
    value = tl.load(logits_ptr + row * U + column, mask=column >= 0, other=float("-inf"))
    tl.store(spread_ptr + row * V + token, value, mask=inside)
