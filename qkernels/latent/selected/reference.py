"""Plain torch references of an indexer's scores and of attention over the selected keys.

Legend: see latent/selected/ops.py; N some rows.
"""

import torch

from qkernels.latent.cache import PagedLatents
from qkernels.latent.selected.selected_keys import SelectedKeys

MAX_ENTRIES = 2**15  # entries that are gathered together


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
    """Return the scores [N, K] in float32: sum of weights * relu(q k) over heads."""
    B = keys_PBD.shape[1]
    # beyond a request's last page, the block table may hold anything
    pages_RX = tables_RX[:, : -(-num_keys // B)].long().clamp(0, len(keys_PBD) - 1)
    scores_NK = q_NID.new_empty((len(q_NID), num_keys), dtype=torch.float32)
    position_K = torch.arange(num_keys, device=q_NID.device)
    for request in requests_N.unique().tolist():
        rows = requests_N == request
        keys_KD = keys_PBD[pages_RX[request]].flatten(0, 1)[:num_keys].float()
        products_NIK = (q_NID[rows].float() @ keys_KD.T).relu()
        scores_NK[rows] = (weights_NI[rows, None].float() @ products_NIK)[:, 0]
    return scores_NK.masked_fill_(position_K > last_N[:, None], -torch.inf)


def selected_latent_attention(
    q_THE: torch.Tensor,
    cache: PagedLatents,
    selected: SelectedKeys,
    *,
    latent_width: int,
    scale: float,
) -> torch.Tensor:
    """Return attention of each row over its selected entries, in float32: [T, H, L]."""
    (T, H, _), S = q_THE.shape, selected.slots_TS.shape[1]
    out_THL = q_THE.new_empty((T, H, latent_width))
    single = cache.by_slot()
    place_S = torch.arange(S, device=q_THE.device)
    for rows in torch.arange(T, device=q_THE.device).split(max(1, MAX_ENTRIES // S)):
        slots_NS = selected.slots_TS[rows].long()
        entries_NSE = single.entries(slots_NS, latent_width, torch.float32)[:, :, 0]
        hidden_NS = place_S >= selected.counts_T[rows, None]
        entries_NSE = entries_NSE.masked_fill(hidden_NS[..., None], 0)
        scores_NHS = q_THE[rows].float() @ entries_NSE.transpose(1, 2) * scale
        weights_NHS = scores_NHS.masked_fill(hidden_NS[:, None], -torch.inf).softmax(-1)
        out_THL[rows] = (weights_NHS @ entries_NSE[..., :latent_width]).to(q_THE.dtype)
    return out_THL
