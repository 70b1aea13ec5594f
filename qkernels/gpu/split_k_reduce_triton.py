"""Split-K reduction in the last block to arrive, in Triton (gpu/split_k_reduce.py is in Gluon).

A block stores its partial sums and increments its tile's counter. The last of the tile's SPLIT
blocks sums all splits in order, so the result does not depend on which block came last. It also
resets the counter to zero.

    if arrives_last(sums, ptrs + split * stride, mask, counter_ptr, SPLIT):
        sums = sum_splits(ptrs, stride, mask, SPLIT)
        .. the epilogue
        tl.store(counter_ptr, 0)
"""

import triton
import triton.language as tl


@triton.jit
def arrives_last(sums, ptrs, mask, counter_ptr, SPLIT: tl.constexpr):
    """Store this block's partial sums. Return True if all other splits have stored theirs."""
    tl.store(ptrs, sums, mask=mask)
    # every thread's partial sums are stored before one thread increments the counter
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLIT - 1


@triton.jit
def sum_splits(ptrs, stride, mask, SPLIT: tl.constexpr):
    """Add the partial sums of all splits in order. `ptrs`: pointers to the sums of split 0."""
    sums = tl.zeros(ptrs.shape, ptrs.dtype.element_ty)
    for i in tl.static_range(SPLIT):
        # .cg: other SMs wrote these, and this SM's L1 is not coherent with them
        sums += tl.load(ptrs + i * stride, mask=mask, other=0, cache_modifier=".cg")
    return sums
