"""Count of the rows that recurrent states lack, in Triton with one program per request.

Legend: see ops.py.
"""

import torch
import triton
import triton.language as tl

from qkernels.causal_conv.state import StateStep
from qkernels.gpu.launch import launch, on_device


def lacking_rows_(covered_P: torch.Tensor, step: StateStep, most_rows: int) -> torch.Tensor:
    """Implement ops.lacking_rows_."""
    lacking_R = torch.empty_like(step.slots_R)
    with on_device(covered_P):
        launch(
            _lacking_rows,
            (len(lacking_R),),
            covered_P,
            step.query_starts_R1,
            step.context_lengths_R,
            step.slots_R,
            lacking_R,
            most_rows,
            num_warps=1,
        )
    return lacking_R


@triton.jit(do_not_specialize=["most_rows"])
def _lacking_rows(covered_ptr, starts_ptr, lengths_ptr, slots_ptr, lacking_ptr, most_rows):
    r = tl.program_id(0)
    slot = tl.load(slots_ptr + r)
    count = tl.load(starts_ptr + r + 1) - tl.load(starts_ptr + r)
    start = tl.load(lengths_ptr + r) - count
    is_kept = (slot >= 0) & (count > 0)
    covered = tl.load(covered_ptr + slot, mask=is_kept, other=0)
    lacking = tl.minimum(tl.maximum(start - covered, 0), most_rows)
    tl.store(lacking_ptr + r, tl.where(is_kept & (start > 0), lacking, 0))
    is_verify = (count > 1) & (count <= most_rows)
    tl.store(covered_ptr + slot, tl.where(is_verify, start, start + count), mask=is_kept)
