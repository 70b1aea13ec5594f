"""Split the rows of several requests into blocks, so that each block belongs to one request.

Request r owns the blocks from starts[r] // BLOCK_Q + r on. A grid of T // BLOCK_Q + R blocks holds
all of them. Legend: T rows of a step, R requests.
"""

import triton
import triton.language as tl


@triton.jit
def request_of(starts_ptr, block, R, BLOCK_Q: tl.constexpr):
    """Return the request that owns the block: the last r with starts[r] // BLOCK_Q + r <= block.

    Each load delays the first load of keys by 0.3 us. So each load compares 32 requests: one
    request needs no load, and up to 32 need one.
    """
    probe = tl.arange(0, 32)
    first = 0
    count = R
    while count > 1:
        apart = (count + 31) // 32
        request = first + probe * apart
        inside = probe * apart < count
        start = tl.load(starts_ptr + request, mask=inside, other=0)
        owned = inside & (start // BLOCK_Q + request <= block)
        first += (tl.sum(owned.to(tl.int32)) - 1) * apart
        count = min(apart, R - first)
    return first
