"""Choice of the keys that each row of a step sees: those with the highest scores of an indexer.

Legend: T rows of a step, R requests, I heads of the indexer, D numbers of its keys, P pages, B
tokens of a page, N some rows, K keys, S selected keys.
"""

import torch

from qkernels.attention.cache import AttentionStep

MAX_BYTES = 2**27  # of the scores of the rows that are scored together
LOW_BITS = 2**32 - 1
# the highest number that `_ordered` makes of minus infinity
LAST_OF_NONE = ((-0x7F800000 - 1) << 32) | LOW_BITS


def rows_of_block(num_keys: int) -> int:
    """Return the rows whose scores of `num_keys` keys take at most MAX_BYTES."""
    return max(1, MAX_BYTES // (4 * num_keys))


def rows_and_positions(step: AttentionStep, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request and the position of each row, int32 [T]; -1 for rows of no request."""
    starts_R1, device = step.query_starts_R1, step.query_starts_R1.device
    rows_T = torch.arange(num_rows, dtype=torch.int32, device=device)
    ends_R = starts_R1[1:].contiguous()
    found_T = torch.searchsorted(ends_R, rows_T, right=True, out_int32=True)
    requests_T = found_T.clamp(max=len(ends_R) - 1)
    index_T = requests_T.long()
    positions_T = step.context_lengths_R[index_T] - (ends_R[index_T] - rows_T)
    return requests_T, torch.where(found_T < len(ends_R), positions_T, -1)


def _ordered(scores_NK: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers in the order of the scores, and of equal ones from the last key on."""
    bits_NK = (scores_NK + 0.0).view(torch.int32)  # -0 becomes 0
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
    """Return the slots [N, S] of the highest scores in the order of positions, and their counts.

    Of equal scores the first ones are taken: a key whose heads all have relu 0 has score 0, so they
    are frequent, and topk takes any of them.
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
