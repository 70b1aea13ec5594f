"""Gates of a token in Triton: the decay of a head's state, and the strength of its update.

Legend: see ops.py.
"""

import triton
import triton.language as tl

# exp(-50) times a number is below the number's float32 rounding. With this bound, sums of such
# logarithms stay small enough for their differences to be exact to 2e-4.
MIN_DECAY_LOG = tl.constexpr(-50.0)


@triton.jit
def decay_log(a, a_log, dt_bias, BOUND: tl.constexpr = 0.0):
    """Return the log of the state's decay: -exp(a_log) softplus(a + dt_bias), at least -50.

    With BOUND below 0 it is BOUND sigmoid(exp(a_log) (a + dt_bias)).
    """
    x = a + dt_bias
    if BOUND < 0.0:
        return BOUND / (1.0 + tl.exp(-tl.exp(a_log) * x))
    else:
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        return tl.maximum(-tl.exp(a_log) * softplus, MIN_DECAY_LOG)


@triton.jit
def write_strength(b, FACTOR: tl.constexpr = 1.0):
    """Return FACTOR sigmoid(b), the factor of what a token writes into the state."""
    strength = 1.0 / (1.0 + tl.exp(-b))
    if FACTOR == 1.0:
        return strength
    else:
        return FACTOR * strength
