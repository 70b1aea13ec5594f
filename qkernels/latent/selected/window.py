"""The entries in the window of each row, as selected keys. Legend: see latent/selected/ops.py."""

import torch

from qkernels.attention.cache import AttentionStep
from qkernels.attention.selected.order import rows_and_positions
from qkernels.latent.selected.selected_keys import SelectedKeys


def keys_in_window(
    step: AttentionStep, num_rows: int, *, window: int, page_size: int
) -> SelectedKeys:
    """Return the last `window` keys up to each row's own; all keys if there are fewer."""
    requests_T, positions_T = rows_and_positions(step, num_rows)
    counts_T = (positions_T + 1).clamp(1, window)
    first_T = (positions_T + 1 - window).clamp(min=0)
    S = min(window, step.max_context_len)
    place_S = torch.arange(S, dtype=torch.int32, device=positions_T.device)
    keys_TS = first_T[:, None] + place_S
    last = step.block_tables_RX.shape[1] - 1
    pages_TS = step.block_tables_RX[
        requests_T.long()[:, None], (keys_TS // page_size).clamp(max=last).long()
    ]
    slots_TS = pages_TS * page_size + keys_TS % page_size
    is_seen_TS = (place_S < counts_T[:, None]) & (positions_T >= 0)[:, None]
    return SelectedKeys(slots_TS=torch.where(is_seen_TS, slots_TS, 0), counts_T=counts_T)
