"""Gluon functions that fold the sums of a segment of keys into those of the segments after it.

sm90_segments.py, sm90_prefill.py and merge_segments.py compute the same expressions, with explicit
multiply-adds. So a row has the same bits in all three.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def fold_factors(largest, segment_largest):
    """Return the larger of two largest scores, and the factor of the sums that belong to each."""
    new_largest = gl.maximum(largest, segment_largest)
    # a row that has seen no key yet: -inf - -inf would be NaN
    base = gl.where(new_largest == float("-inf"), 0.0, new_largest)
    return new_largest, gl.exp2(largest - base), gl.exp2(segment_largest - base)


@gluon.jit
def fold_values(values, keep, segment_values, add):
    """Return the sums [M, D] times `keep` [M] plus the segment's sums times `add` [M]."""
    return gl.fma(values, keep[:, None], segment_values * add[:, None])
