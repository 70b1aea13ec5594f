"""Select the keys that each row of a step attends to: those with the highest indexer scores.

Legend: see latent/selected/ops.py; N some rows.
"""

import torch

from qkernels.attention.selected.order import top_indices


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

    Ties, which go to the earliest keys, are frequent: a key whose heads all have relu 0 has score
    0.
    """
    K = scores_NK.shape[1]
    keys_NS = top_indices(scores_NK, most)
    is_key_NS = keys_NS < K
    keys_NS = keys_NS.clamp(max=K - 1)
    pages_NS = tables_RX[requests_N.long()[:, None], keys_NS // page_size]
    slots_NS = pages_NS * page_size + (keys_NS % page_size).int()
    counts_N = (last_N + 1).clamp(1, keys_NS.shape[1])
    return torch.where(is_key_NS, slots_NS, 0), counts_N
