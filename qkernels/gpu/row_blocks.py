"""Split the rows of several requests into blocks, so that each block belongs to one request.

Where the host knows that a few blocks hold the rows of every request, each request owns that many.
Otherwise request r owns the blocks from starts[r] // BLOCK_Q + r on, and a grid of T // BLOCK_Q + R
blocks holds all of them. Legend: T rows of a step, R requests.
"""

import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div


def row_grid(num_rows: int, num_requests: int, max_rows: int, block_q: int) -> tuple[int, int]:
    """Return the number of blocks, and the number that each request owns; 0: not the same.

    `max_rows`: rows of a request at most.
    """
    each = ceil_div(max_rows, block_q)
    blocks = num_rows // block_q + num_requests
    return (num_requests * each, each) if num_requests * each <= blocks else (blocks, 0)


@triton.jit
def rows_of(starts_ptr, block, R, blocks_each, BLOCK_Q: tl.constexpr):
    """Return a block's request, the request's first row and number of rows, and the block's first
    row within the request.

    `blocks_each`: as `row_grid` returns it.
    """
    index = 0
    if blocks_each > 0:
        request = block // blocks_each
        index = block % blocks_each
    else:
        request = request_of(starts_ptr, block, R, BLOCK_Q)
    start = tl.load(starts_ptr + request)
    if blocks_each == 0:
        index = block - start // BLOCK_Q - request
    return request, start, tl.load(starts_ptr + request + 1) - start, index * BLOCK_Q


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
