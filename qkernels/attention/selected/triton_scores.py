"""An indexer's scores of blocks of keys in pages, in Triton.

A program scores a block for one row: the indexer's heads are the rows of one product with some keys
at a time, and the program keeps the largest value of each head. Legend: see
attention/selected/ops.py; N rows.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device

KEYS = 64  # keys of one product


def block_scores(
    q_NJD: torch.Tensor,
    keys_PBD: torch.Tensor,
    tables_RX: torch.Tensor,
    requests_N: torch.Tensor,
    last_N: torch.Tensor,
    *,
    num_keys: int,
    block_size: int,
) -> torch.Tensor:
    """Implement the operation block_scores."""
    N, heads, D = q_NJD.shape
    num_blocks = ceil_div(num_keys, block_size)
    scores_NJY = q_NJD.new_empty((N, heads, num_blocks), dtype=torch.float32)
    if N == 0:
        return scores_NJY
    with on_device(q_NJD):
        launch(
            _block_scores,
            (N, num_blocks),
            q_NJD.contiguous(),
            keys_PBD,
            tables_RX,
            requests_N,
            last_N,
            scores_NJY,
            num_blocks,
            tables_RX.stride(0),
            J=heads,
            D=D,
            B=keys_PBD.shape[1],
            SIZE=block_size,
            PADDED_J=max(16, power_of_two(heads)),
            PADDED_D=max(16, power_of_two(D)),
            KEYS=min(KEYS, max(16, power_of_two(block_size))),
            num_warps=4,
        )
    return scores_NJY


@triton.jit(do_not_specialize=["Y"])
def _block_scores(
    q_ptr,  # [N, J, D]
    keys_ptr,  # [P, B, D]
    tables_ptr,  # [R, X]
    requests_ptr,  # [N]
    last_ptr,  # [N]: position of each row; -1: it sees no key
    scores_ptr,  # float32 [N, J, Y]
    Y,
    stride_table,
    J: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_J: tl.constexpr,
    PADDED_D: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * SIZE
    last = tl.load(last_ptr + row)
    head = tl.arange(0, PADDED_J)
    best = tl.full([PADDED_J], float("-inf"), tl.float32)
    if start <= last:
        d = tl.arange(0, PADDED_D)
        table = tables_ptr + tl.load(requests_ptr + row).to(tl.int64) * stride_table
        q = tl.load(
            q_ptr + (row * J + head)[:, None] * D + d[None, :],
            mask=(head < J)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        end = tl.minimum(last + 1, start + SIZE)
        for first in range(start, end, KEYS):
            key = first + tl.arange(0, KEYS)
            seen = key < end
            page = tl.load(table + key // B, mask=seen, other=0).to(tl.int64)
            slot = page * B + key % B
            k = tl.load(
                keys_ptr + slot[:, None] * D + d[None, :],
                mask=seen[:, None] & (d < D)[None, :],
                other=0.0,
            )
            product = tl.dot(q, tl.trans(k), input_precision="ieee")
            product = tl.where(seen[None, :], product, float("-inf"))
            best = tl.maximum(best, tl.max(product, 1))
    tl.store(scores_ptr + (row * J + head) * Y + tl.program_id(1), best, mask=head < J)
