"""Requests and positions of a step's rows, and numbers that sort like scores.

Legend: see attention/selected/ops.py; N some rows, K keys or blocks.
"""

import torch

from qkernels.attention.cache import AttentionStep

MAX_BYTES = 2**27  # most bytes of the scores that are computed together
LOW_BITS = 2**32 - 1
# largest number to which `ordered` maps minus infinity
LAST_OF_NONE = ((-0x7F800000 - 1) << 32) | LOW_BITS


def rows_of_block(num_scores: int) -> int:
    """Return the number of rows whose `num_scores` scores each take at most MAX_BYTES."""
    return max(1, MAX_BYTES // (4 * num_scores))


def rows_and_positions(step: AttentionStep, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request and the position of each row, int32 [T].

    The position is -1 for rows that belong to no request.
    """
    starts_R1, device = step.query_starts_R1, step.query_starts_R1.device
    rows_T = torch.arange(num_rows, dtype=torch.int32, device=device)
    ends_R = starts_R1[1:].contiguous()
    found_T = torch.searchsorted(ends_R, rows_T, right=True, out_int32=True)
    requests_T = found_T.clamp(max=len(ends_R) - 1)
    index_T = requests_T.long()
    positions_T = step.context_lengths_R[index_T] - (ends_R[index_T] - rows_T)
    return requests_T, torch.where(found_T < len(ends_R), positions_T, -1)


def ordered(scores_NK: torch.Tensor) -> torch.Tensor:
    """Map scores to int64 numbers that sort like the scores; ties sort earlier keys higher.

    The last dim counts; there may be more dims before it.
    """
    bits_NK = (scores_NK + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    order_NK = torch.where(bits_NK < 0, bits_NK ^ 0x7FFFFFFF, bits_NK).long()
    K = scores_NK.shape[-1]
    return (order_NK << 32) | torch.arange(K - 1, -1, -1, device=scores_NK.device)


def top_indices(scores_NK: torch.Tensor, most: int) -> torch.Tensor:
    """Return the indices [N, S] of the highest scores of each row, ascending; K for none.

    Minus infinity is not chosen. Ties go to the lowest indices; torch.topk may return any.
    """
    K = scores_NK.shape[-1]
    found_NS = ordered(scores_NK).topk(min(most, K), dim=-1).values
    places_NS = K - 1 - (found_NS & LOW_BITS)
    return torch.where(found_NS <= LAST_OF_NONE, K, places_NS).sort(dim=-1).values
