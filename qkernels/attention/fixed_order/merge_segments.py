"""Fold the partial sums of a row's segments, from its last segment to its first, in Triton.

Legend: see qkernels/ops.py; G segments of the longest context.
"""

import torch
import triton
import triton.language as tl

from qkernels.attention.cache import AttentionStep
from qkernels.attention.fixed_order.config import SEGMENT_KEYS
from qkernels.gpu.config import power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.row_blocks import request_of


def merge_segments(
    partials_THGD: torch.Tensor,
    sums_2THG: torch.Tensor,
    step: AttentionStep,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    *,
    window: int | None,
    block_q: int,
    segment_keys: int = SEGMENT_KEYS,
    chunk_size: int | None = None,
) -> None:
    """Fold weighted sums, largest scores and sums of weights, all float32, into `out_THD`."""
    T, H, G, D = partials_THGD.shape
    R = step.context_lengths_R.shape[0]
    with on_device(out_THD):
        launch(
            _merge_segments,
            (T // block_q + R, H),
            partials_THGD,
            sums_2THG,
            step.query_starts_R1,
            step.context_lengths_R,
            out_THD,
            sinks_H,
            R,
            T,
            G,
            window or 0,
            H=H,
            D=D,
            PADDED_D=power_of_two(D),
            WINDOWED=window is not None,
            BLOCK_Q=block_q,
            KEYS=segment_keys,
            CHUNK=chunk_size or 0,
            num_warps=1,
        )


@triton.jit
def fold_segment(largest, total, top, of_segment):
    """Add one segment to the largest score and the sum of weights, as in sm90_fold.py.

    Also returns the factors of the values summed so far and of the segment's values.
    """
    new_largest = tl.maximum(largest, top)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    keep, add = tl.exp2(largest - base), tl.exp2(top - base)
    return new_largest, tl.fma(total, keep, of_segment * add), keep, add


@triton.jit(do_not_specialize=["R", "T", "num_segments", "window"])
def _merge_segments(
    partials_ptr,
    sums_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    sinks_ptr,  # [H], or None
    R,
    T,
    num_segments,
    window,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    request = request_of(starts_ptr, block, R, BLOCK_Q)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    before = tl.load(lengths_ptr + request) - count
    first_row = (block - start // BLOCK_Q - request) * BLOCK_Q
    d = tl.arange(0, PADDED_D)
    for row in range(first_row, min(first_row + BLOCK_Q, count)):
        out_row = (start + row).to(tl.int64) * H + head
        tops_ptr = sums_ptr + out_row * num_segments
        totals_ptr = tops_ptr + T.to(tl.int64) * H * num_segments
        values_ptrs = partials_ptr + out_row * num_segments * D + d
        last = (before + row) // KEYS
        first = 0
        if WINDOWED:
            first = max(0, before + row - window + 1) // KEYS
        if CHUNK > 0:
            first = (before + row) // CHUNK * CHUNK // KEYS
        largest = float("-inf")
        total = 0.0
        if sinks_ptr is not None:
            largest = tl.load(sinks_ptr + head) * 1.4426950408889634  # log2(e)
            total = 1.0
        values = tl.zeros([PADDED_D], tl.float32)
        for i in tl.range(0, last - first + 1, loop_unroll_factor=8):
            segment = last - i
            top = tl.load(tops_ptr + segment)
            of_segment = tl.load(totals_ptr + segment)
            summed = tl.load(values_ptrs + segment * D, mask=d < D, other=0.0)
            largest, total, keep, add = fold_segment(largest, total, top, of_segment)
            values = tl.fma(values, keep, summed * add)
        inverse = 1.0 / tl.where(total == 0, 1.0, total)
        tl.store(out_ptr + out_row * D + d, (values * inverse).to(out_ptr.dtype.element_ty), d < D)
