"""Triton device function that loads a tensor or adds its split-K partial sums while loading."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from qkernels.operands.split_k import LinearOutput, SplitKPartials

_TRITON_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialsFormat:
    """Compile-time constants of load_reduced."""

    parts: int  # number of partial sums to add; 0: the source is the tensor itself
    dtype: tl.dtype  # dtype of the tensor


def partials_source(x: LinearOutput) -> tuple[torch.Tensor, int, PartialsFormat]:
    """Return load_reduced's arguments: (tensor or first split, stride between splits, format)."""
    dtype = _TRITON_DTYPE[x.dtype]
    if isinstance(x, SplitKPartials):
        parts = x.parts
        return parts[0], parts.stride(0), PartialsFormat(parts=parts.shape[0], dtype=dtype)
    return x, 0, PartialsFormat(parts=0, dtype=dtype)


def reduce_warps(block: int) -> int:
    """Return the warps of a program that adds partial sums of `block` channels.

    Each thread has 2 channels or more.
    """
    return min(16, max(1, block // 64))


def contiguous(x: LinearOutput) -> LinearOutput:
    """Return the tensor or the partial sums in contiguous memory."""
    if isinstance(x, SplitKPartials):
        return replace(x, parts=x.parts.contiguous())
    return x.contiguous()


@triton.jit
def load_reduced(ptrs, mask, stride_part, SUM: tl.constexpr):
    """Load the values at `ptrs`, with splits added in order; 0 where masked.

    `ptrs` point into the tensor that partials_source returns.
    """
    PARTS: tl.constexpr = SUM.parts
    if PARTS == 0:
        return tl.load(ptrs, mask=mask, other=0.0)
    else:
        # all loads are in flight before the first is added
        parts = ()
        for i in tl.static_range(PARTS):
            parts = parts + (tl.load(ptrs + i * stride_part, mask=mask, other=0.0),)
        total = parts[0]
        for i in tl.static_range(1, PARTS):
            total += parts[i]
        return total.to(SUM.dtype)
