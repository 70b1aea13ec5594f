"""Plain torch reference of an indexer's scores of blocks. Legend: see attention/selected/ops.py."""

import torch
import torch.nn.functional as F


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
    """Return the scores [N, J, Y] in float32: the largest q k of a block's keys that a row sees."""
    B, num_blocks = keys_PBD.shape[1], -(-num_keys // block_size)
    # beyond a request's last page, the block table may hold anything
    pages_RX = tables_RX[:, : -(-num_keys // B)].long().clamp(0, len(keys_PBD) - 1)
    scores_NJY = q_NJD.new_empty((*q_NJD.shape[:2], num_blocks), dtype=torch.float32)
    position_K = torch.arange(num_keys, device=q_NJD.device)
    for request in requests_N.unique().tolist():
        rows = requests_N == request
        keys_KD = keys_PBD[pages_RX[request]].flatten(0, 1)[:num_keys].float()
        products_NJK = q_NJD[rows].float() @ keys_KD.T
        products_NJK = products_NJK.masked_fill(position_K > last_N[rows, None, None], -torch.inf)
        rest = num_blocks * block_size - num_keys
        products_NJK = F.pad(products_NJK, (0, rest), value=-torch.inf)
        scores_NJY[rows] = products_NJK.unflatten(2, (num_blocks, block_size)).amax(-1)
    return scores_NJY
