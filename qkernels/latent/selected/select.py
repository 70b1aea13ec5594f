"""Select the keys that each row of a step attends to: those with the highest indexer scores.

Legend: see latent/selected/ops.py; N some rows.
"""

import torch

from qkernels.attention.cache import AttentionStep

MAX_BYTES = 2**27  # most bytes of the scores that are computed together
LOW_BITS = 2**32 - 1
# largest number to which `_ordered` maps minus infinity
LAST_OF_NONE = ((-0x7F800000 - 1) << 32) | LOW_BITS


def rows_of_block(num_keys: int) -> int:
    """Return the number of rows whose scores of `num_keys` keys take at most MAX_BYTES."""
    return max(1, MAX_BYTES // (4 * num_keys))


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


def _ordered(scores_NK: torch.Tensor) -> torch.Tensor:
    """Map scores to int64 numbers that sort like the scores; ties sort earlier keys higher."""
    bits_NK = (scores_NK + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    order_NK = torch.where(bits_NK < 0, bits_NK ^ 0x7FFFFFFF, bits_NK).long()
    K = scores_NK.shape[1]
    return (order_NK << 32) | torch.arange(K - 1, -1, -1, device=scores_NK.device)


def highest(
    scores_NK: torch.Tensor,
    tables_RX: torch.Tensor,
    requests_N: torch.Tensor,
    last_N: torch.Tensor,
    *,
    most: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots [N, S] of the highest scores, by position, and their counts.

    Ties go to the earliest keys. They are frequent: a key whose heads all have relu 0 has score 0.
    torch.topk may return any of them.
    """
    K = scores_NK.shape[1]
    found_NS = _ordered(scores_NK).topk(min(most, K), dim=1).values
    keys_NS = K - 1 - (found_NS & LOW_BITS)
    keys_NS = torch.where(found_NS <= LAST_OF_NONE, K, keys_NS).sort(dim=1).values
    is_key_NS = keys_NS < K
    keys_NS = keys_NS.clamp(max=K - 1)
    pages_NS = tables_RX[requests_N.long()[:, None], keys_NS // page_size]
    slots_NS = pages_NS * page_size + (keys_NS % page_size).int()
    counts_N = (last_N + 1).clamp(1, keys_NS.shape[1])
    return torch.where(is_key_NS, slots_NS, 0), counts_N
