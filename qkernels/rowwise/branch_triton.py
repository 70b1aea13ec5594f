"""What a branch does to its result (branch.py), and the GELU of gates, for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def changed_branch(x, weight, C, EPS: tl.constexpr, FACTOR: tl.constexpr, DTYPE: tl.constexpr):
    """x, float32 of one row, after the branch's norm and factor; `weight` None: no norm."""
    if weight is not None:
        shrink = tl.rsqrt(tl.sum(x * x, 0) / C + EPS)
        x = weighted(x * shrink, weight, DTYPE).to(tl.float32)
    if FACTOR != 1.0:
        x = (x * FACTOR).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def weighted(normed, weight, DTYPE: tl.constexpr):
    """weight * normed in DTYPE; `normed` is x over its root mean square, float32.

    With a float32 weight the product alone is rounded, else `normed` before it, too.
    """
    if weight.dtype != tl.float32:
        normed = normed.to(DTYPE).to(tl.float32)
    return (weight.to(tl.float32) * normed).to(DTYPE)


@triton.jit
def gelu_argument(x):
    """z such that gelu(x), with the tanh approximation, is x / (1 + exp(-z))."""
    # 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3)
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)
