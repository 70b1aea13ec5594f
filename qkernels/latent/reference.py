"""Plain torch references of latent attention; CPUs run them.

Legend: see latent/ops.py; N rows of a request, K its keys.
"""

import torch

from formats.numerics.activation import quantize_input as round_input
from formats.scheme import ActivationSpec
from qkernels.attention.cache import AttentionStep
from qkernels.attention.reference import apply_rope
from qkernels.latent.cache import PagedLatents
from qkernels.rowwise.reference import normalized
from qkernels.rowwise.spec import NormSpec


def rope_write_latents_(
    q_THR: torch.Tensor,
    made_TE: torch.Tensor,
    norm_L: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    cache: PagedLatents,
    slots_T: torch.Tensor,
    *,
    eps: float,
    interleaved: bool = False,
) -> torch.Tensor:
    """Normalize latents, rotate keys and queries, write entries; return queries [T, H, E]."""
    L = norm_L.shape[0]
    q_THR, r_T1R = apply_rope(q_THR, made_TE[:, None, L:], cos_sin, positions_T, interleaved)
    c_TL = normalized(made_TE[:, :L], NormSpec(weight_C=norm_L, eps=eps))
    _write(c_TL, r_T1R[:, 0], cache, slots_T)
    return torch.cat([q_THR.new_zeros((*q_THR.shape[:2], L)), q_THR], dim=2)


def _write(
    c_TL: torch.Tensor, r_TR: torch.Tensor, cache: PagedLatents, slots_T: torch.Tensor
) -> None:
    """Write each token's entry into its slot, page * B + offset; slot -1 is padding.

    The host does not wait: a padding token rewrites the first real token, or else the old entry.
    """
    if not slots_T.numel():
        return
    valid_T = slots_T >= 0
    tokens_T = torch.arange(slots_T.shape[0], device=slots_T.device)
    source_T = torch.where(valid_T, tokens_T, valid_T.int().argmax())
    slot_T = slots_T[source_T].long().clamp(min=0)
    index = (slot_T // cache.page_size, slot_T % cache.page_size)
    parts, dtype = (c_TL[source_T], r_TR[source_T]), cache.pages.dtype
    if cache.scales is not None:
        spec = ActivationSpec(type="int" if dtype == torch.int8 else "float")
        parts, scales = zip(*(round_input(part, spec, None) for part in parts), strict=True)
        scales_T2 = torch.where(valid_T.any(), torch.cat(scales, dim=1), cache.scales[index])
        cache.scales.index_put_(index, scales_T2)
    # as bytes, because not every device has torch.where for float8
    stored = cache.pages if dtype.itemsize > 1 else cache.pages.view(torch.uint8)
    rows_TE = torch.cat([part.to(dtype).view(stored.dtype) for part in parts], dim=1)
    stored.index_put_(index, torch.where(valid_T.any(), rows_TE, stored[index]))


def latent_attention(
    q_THE: torch.Tensor,
    cache: PagedLatents,
    step: AttentionStep,
    *,
    latent_width: int,
    scale: float,
) -> torch.Tensor:
    """Return causal attention of all heads over the same entries, in float32: [T, H, L].

    Row i of a request with `count` rows has position context_length - count + i. The value of a key
    is the first L numbers of its entry. Rows that belong to no request are zero.
    """
    T, H, E = q_THE.shape
    out_THL = q_THE.new_zeros((T, H, latent_width))
    starts, lengths = step.query_starts_R1.tolist(), step.context_lengths_R.tolist()
    for request, length in enumerate(lengths):
        start, stop = starts[request], starts[request + 1]
        if start == stop or length == 0:
            continue
        pages = step.block_tables_RX[request, : -(-length // cache.page_size)].long()
        entries_XBE = cache.entries(pages, latent_width, torch.float32)
        entries_KE = entries_XBE.flatten(0, 1)[:length]
        scores_NHK = q_THE[start:stop].float() @ entries_KE.T * scale
        position_N = torch.arange(length - (stop - start), length, device=q_THE.device)
        key_K = torch.arange(length, device=q_THE.device)
        hidden_NK = key_K[None] > position_N[:, None]
        weights_NHK = scores_NHK.masked_fill(hidden_NK[:, None], -torch.inf).softmax(-1)
        out_THL[start:stop] = (weights_NHK @ entries_KE[:, :latent_width]).to(q_THE.dtype)
    return out_THL
