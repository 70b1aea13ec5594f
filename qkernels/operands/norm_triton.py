"""The end of an RMS norm, for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def weighted(normed, weight, DTYPE: tl.constexpr):
    """weight * normed in DTYPE; `normed` is x over its root mean square, float32.

    With a float32 weight the product alone is rounded, else `normed` before it, too.
    """
    if weight.dtype != tl.float32:
        normed = normed.to(DTYPE).to(tl.float32)
    return (weight.to(tl.float32) * normed).to(DTYPE)
