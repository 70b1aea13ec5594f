"""An indexer's scores of the keys in pages, in Triton.

A program scores a block of keys for one row. The indexer's heads are the rows of one product; the
program weights its positive values and sums them. Legend: see latent/selected/ops.py; N rows.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device

KEYS = 64  # keys per program


def index_scores(
    q_NID: torch.Tensor,
    weights_NI: torch.Tensor,
    keys_PBD: torch.Tensor,
    tables_RX: torch.Tensor,
    requests_N: torch.Tensor,
    last_N: torch.Tensor,
    *,
    num_keys: int,
) -> torch.Tensor:
    """Implement ops.index_scores."""
    N, heads, D = q_NID.shape
    scores_NK = q_NID.new_empty((N, num_keys), dtype=torch.float32)
    if N == 0:
        return scores_NK
    with on_device(q_NID):
        launch(
            _index_scores,
            (N, ceil_div(num_keys, KEYS)),
            q_NID.contiguous(),
            weights_NI.contiguous(),
            keys_PBD,
            tables_RX,
            requests_N,
            last_N,
            scores_NK,
            num_keys,
            tables_RX.stride(0),
            I=heads,
            D=D,
            B=keys_PBD.shape[1],
            PADDED_I=max(16, power_of_two(heads)),
            PADDED_D=max(16, power_of_two(D)),
            KEYS=KEYS,
            num_warps=4,
        )
    return scores_NK


@triton.jit(do_not_specialize=["K"])
def _index_scores(
    q_ptr,  # [N, I, D]
    weights_ptr,  # float32 [N, I]
    keys_ptr,  # [P, B, D]
    tables_ptr,  # [R, X]
    requests_ptr,  # [N]
    last_ptr,  # [N]: position of each row; -1: it sees no key
    scores_ptr,  # float32 [N, K]
    K,
    stride_table,
    I: tl.constexpr,  # noqa: E741
    D: tl.constexpr,
    B: tl.constexpr,
    PADDED_I: tl.constexpr,
    PADDED_D: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    last = tl.load(last_ptr + row)
    seen = key <= last
    score = tl.full([KEYS], float("-inf"), tl.float32)
    if tl.program_id(1) * KEYS <= last:
        head = tl.arange(0, PADDED_I)
        d = tl.arange(0, PADDED_D)
        of_head = head < I
        table = tables_ptr + tl.load(requests_ptr + row).to(tl.int64) * stride_table
        page = tl.load(table + key // B, mask=seen, other=0).to(tl.int64)
        slot = page * B + key % B
        q = tl.load(
            q_ptr + (row * I + head)[:, None] * D + d[None, :],
            mask=of_head[:, None] & (d < D)[None, :],
            other=0.0,
        )
        k = tl.load(
            keys_ptr + slot[:, None] * D + d[None, :],
            mask=seen[:, None] & (d < D)[None, :],
            other=0.0,
        )
        weight = tl.load(weights_ptr + row * I + head, mask=of_head, other=0.0)
        product = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
        score = tl.where(seen, tl.sum(product * weight[:, None], 0), score)
    tl.store(scores_ptr + row * K + key, score, mask=key < K)
