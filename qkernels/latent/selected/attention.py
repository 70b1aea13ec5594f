"""Attention over selected entries, by the Triton kernel of latent attention.

Each row is passed as a separate request with pages of one entry; its block table is the selected
slots. Legend: T rows of a step, H query heads, E numbers of an entry, L of its latent.
"""

import torch

from qkernels.attention.cache import AttentionStep
from qkernels.latent.cache import PagedLatents
from qkernels.latent.selected.selected_keys import SelectedKeys
from qkernels.latent.triton_latent import latent_attention


def selected_latent_attention(
    q_THE: torch.Tensor,
    cache: PagedLatents,
    selected: SelectedKeys,
    *,
    latent_width: int,
    scale: float,
) -> torch.Tensor:
    """Implement ops.selected_latent_attention."""
    T, most = selected.slots_TS.shape
    step = AttentionStep(
        block_tables_RX=selected.slots_TS,
        query_starts_R1=torch.arange(T + 1, dtype=torch.int32, device=q_THE.device),
        context_lengths_R=selected.counts_T,
        max_query_len=1,
        max_context_len=most,
    )
    return latent_attention(q_THE, cache.by_slot(), step, latent_width=latent_width, scale=scale)
