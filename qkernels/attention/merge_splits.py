"""Merge the splits of split-KV attention in Triton, into a tensor or limbs for the next linear.

Legend: T tokens of a step, R requests, H query heads, D head dim; S splits of a context.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.limbs import K_STEP, LimbForm, Limbs, empty_limbs
from qkernels.operands.limbs_triton import in_words, store_limbs

# Splits that are loaded together: 32 cost 1 us more than 8, even if they are empty.
SPLITS_AT_ONCE = tl.constexpr(8)
TRITON_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def merge_splits(
    partials_THSD: torch.Tensor,
    sums_2THS: torch.Tensor,
    query_starts_R1: torch.Tensor,
    out_THD: torch.Tensor,
    limbs: LimbForm | None,
) -> torch.Tensor | Limbs:
    """Merge the splits' weighted sums, largest scores and sums of weights into `out_THD`.

    The inputs are float32. With `limbs`, the result becomes limbs of rows [T, H D], after it is
    rounded to out's dtype; `out_THD` is written only if the limbs include the tensor.
    """
    T, H, S, D = partials_THSD.shape
    requests = query_starts_R1.shape[0] - 1
    constants = {
        "H": H,
        "D": D,
        "SPLIT": S,
        "num_warps": ceil_div(power_of_two(D) * min(S, SPLITS_AT_ONCE.value), 1024),
        **pdl_options(out_THD, T),
    }
    shared = partials_THSD, sums_2THS, query_starts_R1
    with on_device(out_THD):
        if limbs is None:
            grid, padded_d = (T, H), power_of_two(D)
            launch(
                _merge_splits, grid, *shared, out_THD, requests, T, PADDED_D=padded_d, **constants
            )
            return out_THD
        steps = H * D // K_STEP
        found = empty_limbs(limbs, T, H * D, out_THD.device)
        launch(
            _merge_to_limbs,
            (T, steps),
            *shared,
            found.words,
            found.scales,
            found.sums,
            out_THD if limbs.with_tensor else None,
            requests,
            T,
            steps,
            FORM=limbs,
            DTYPE=TRITON_DTYPE[out_THD.dtype],
            **constants,
        )
    return replace(found, tensor=out_THD.view(T, H * D)) if limbs.with_tensor else found


@triton.jit
def _used(sums_ptr, rows, T, H, SPLIT: tl.constexpr):
    """Return the number of splits up to the last that has seen a key, over `rows` [1, X].

    A row is token * H + head.
    """
    split = tl.arange(0, SPLIT)[:, None]
    weights = tl.load(sums_ptr + T.to(tl.int64) * H * SPLIT + rows * SPLIT + split)
    # != 0 so that a NaN is kept
    return tl.max(tl.max(tl.where(weights != 0, split + 1, 0), 1), 0)


@triton.jit
def _merged(partials_ptr, sums_ptr, rows, channels, inside, used, T, H, D, SPLIT: tl.constexpr):
    """Merge the used splits of `rows` [1, X] and `channels` [1, Y] to [Y], where X is Y or 1."""
    AT_ONCE: tl.constexpr = SPLIT if SPLIT < SPLITS_AT_ONCE else SPLITS_AT_ONCE
    weights_ptr = sums_ptr + T.to(tl.int64) * H * SPLIT
    # finite, not -inf: -inf - -inf would be NaN where no split has seen a key
    largest = tl.full([rows.shape[1]], -3.0e38, tl.float32)
    total = tl.zeros([rows.shape[1]], tl.float32)
    out = tl.zeros([channels.shape[1]], tl.float32)
    for first in range(0, used, AT_ONCE):
        splits = rows * SPLIT + first + tl.arange(0, AT_ONCE)[:, None]
        values_ptrs = partials_ptr + splits * D + channels
        weights = tl.load(weights_ptr + splits)
        seen = weights > 0
        values = tl.load(values_ptrs, mask=seen & inside, other=0.0)
        scores = tl.where(seen, tl.load(sums_ptr + splits), -3.0e38)
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        shift = tl.exp2(scores - new_largest[None, :])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights * shift, 0)
        out = out * shrink + tl.sum(values * shift, 0)
        largest = new_largest
    return out / tl.where(total == 0, 1.0, total)


@triton.jit(do_not_specialize=["R", "T"])
def _merge_splits(
    partials_ptr,
    sums_ptr,
    starts_ptr,
    out_ptr,
    R,
    T,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        pdl_launch_and_wait(LAUNCH_FIRST=False)
    end = tl.load(starts_ptr + R)
    rows = token * H + head + tl.zeros([1, 1], tl.int64)
    used = _used(sums_ptr, rows, T, H, SPLIT)
    if token >= end:
        return
    d = tl.arange(0, PADDED_D)
    inside = (d < D)[None, :]
    out = _merged(partials_ptr, sums_ptr, rows, d[None, :], inside, used, T, H, D, SPLIT)
    tl.store(out_ptr + (token * H + head) * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["R", "T"])
def _merge_to_limbs(
    partials_ptr,  # [T, H, S, D]
    sums_ptr,  # [2, T, H, S]
    starts_ptr,  # [R + 1]
    words_ptr,  # as in operands/limbs.py
    scales_ptr,
    limb_sums_ptr,
    out_ptr,  # [T, H, D] or None
    R,
    T,
    steps,
    FORM: tl.constexpr,
    DTYPE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge 128 channels of a token, which may span several heads, and make limbs of them."""
    token, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        # launch dependents after the wait: weight loads of the next product would delay attention
        pdl_launch_and_wait(LAUNCH_FIRST=False)
    end = tl.load(starts_ptr + R)
    channel = step * 128 + tl.arange(0, 128)[None, :]
    head = step * 128 // D if D % 128 == 0 else channel // D
    rows = token * H + head + tl.zeros([1, 1], tl.int64)
    used = _used(sums_ptr, rows, T, H, SPLIT)
    if token >= end:
        return
    inside = channel >= 0
    out = _merged(partials_ptr, sums_ptr, rows, channel % D, inside, used, T, H, D, SPLIT)
    out = out.to(DTYPE)[None, :]
    if out_ptr is not None:
        tl.store(out_ptr + token * steps * 128 + channel, out)
    words = in_words(out, FORM)
    store_limbs(words, words_ptr, scales_ptr, limb_sums_ptr, token, step, T, steps, FORM)
