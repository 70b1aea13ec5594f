"""Latent attention of long chunks with expanded keys and values: one key and value per head.

    k = [W_UK c | r]        v = c W_UV        out = softmax(q k) v

Expanding a key and value costs 2 L (P + V) operations for each head. Each row then needs P + R + V
multiplications per key instead of 2 L + R, so from expanded_rows on the total is lower. The
attention itself is paged_attention over temporary pages of this call. Chunks of up to MAX_KEYS keys
are computed together, heads in groups whose keys and values take at most MAX_BYTES.

    N  rows of the chunks                L  numbers of a latent
    H  heads                             R  numbers of a rotated key
    G  heads of a group                  P  numbers of a query's other part
    K  entries, padded to whole pages    V  numbers of a value
    X  pages of entries                  D  = max(P + R, V)
    B  tokens of a page of keys
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.ops import paged_attention
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.latent.cache import PagedLatents

BLOCK_HEADS = 16  # heads per program over entries: the fewest rows that a tensor core takes
MAX_BYTES = 2**28  # most bytes of the keys and values of a group of heads
MAX_KEYS = 2**18  # most keys of several requests; one head of 256 numbers then fits MAX_BYTES
KEYS_OF_PIECE = 8192  # entries that are decoded together
KEYS_OF_PAGE = 64
# An operation of attention over expanded keys takes about a quarter of the time of an operation of
# attention over entries (sm_90; qserve/notes/latent_attention.md).
SPEED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedChunks:
    """Chunks of some requests and the pages of their entries, made once per step."""

    rows: slice | torch.Tensor  # which of the step's T rows
    # int64: each request's pages of entries, padded with any pages to a whole page of keys
    pages_X: torch.Tensor
    step: AttentionStep  # these rows over expanded keys, in the order of `pages_X`


def expanded_rows(*, heads: int, latent: int, nope: int, value: int) -> int | None:
    """Return the number of rows from which expanded keys are faster; None: they never are."""
    saved = 2 * latent - nope - value
    if saved <= 0:
        return None
    return max(2, latent * (nope + value) * heads // (SPEED * saved * absorbed_heads(heads)))


def absorbed_heads(heads: int) -> int:
    """Return the heads that programs over entries compute, including padding to whole blocks."""
    block = min(BLOCK_HEADS, power_of_two(heads))
    return ceil_div(heads, block) * block


def heads_of_group(
    *, heads: int, keys: int, width: int, element_size: int, max_bytes: int = MAX_BYTES
) -> int:
    """Return the largest divisor of `heads` whose keys and values take at most `max_bytes`."""
    of_head = 2 * keys * width * element_size
    fitting = (size for size in range(heads, 1, -1) if heads % size == 0)
    return next((size for size in fitting if size * of_head <= max_bytes), 1)


def key_page_size(page_size: int) -> int:
    """Return the tokens of a page of expanded keys, if pages of entries have `page_size` tokens."""
    whole = KEYS_OF_PAGE % page_size == 0 or page_size % KEYS_OF_PAGE == 0
    return KEYS_OF_PAGE if whole else page_size


def expanded_attention(
    q_NHD: torch.Tensor,
    cache: PagedLatents,
    chunks: ExpandedChunks,
    key_up_HPL: torch.Tensor,
    value_up_HLV: torch.Tensor,
    *,
    scale: float,
    max_bytes: int = MAX_BYTES,
    max_keys: int = KEYS_OF_PIECE,
) -> torch.Tensor:
    """Implement ops.expanded_latent_attention.

    `max_bytes` limits the memory of keys and values, `max_keys` the memory of entries.
    """
    N, H, width = q_NHD.shape
    V = value_up_HLV.shape[2]
    D = max(width, V)
    K, B = len(chunks.pages_X) * cache.page_size, key_page_size(cache.page_size)
    group = heads_of_group(
        heads=H, keys=K, width=D, element_size=q_NHD.element_size(), max_bytes=max_bytes
    )
    out_NHV = q_NHD.new_empty((N, H, V))
    for first in range(0, H, group):
        heads = slice(first, first + group)
        k_GKD, v_GKD = q_NHD.new_empty((2, group, K, D))
        first_key = 0
        for pages_X in chunks.pages_X.split(max(1, max_keys // cache.page_size)):
            keys = slice(first_key, first_key + len(pages_X) * cache.page_size)
            first_key = keys.stop
            entries_KE = cache.entries(pages_X, key_up_HPL.shape[2], q_NHD.dtype).flatten(0, 1)
            _expand_(
                k_GKD[:, keys, :width],
                v_GKD[:, keys, :V],
                entries_KE,
                key_up_HPL[heads],
                value_up_HLV[heads],
            )
        k_GKD[..., width:] = 0
        k_pages, v_pages = (
            each.unflatten(1, (K // B, B)).permute(1, 2, 0, 3) for each in (k_GKD, v_GKD)
        )
        out_NGD = paged_attention(
            pad(q_NHD[:, heads], (0, D - width)),
            PagedKv(k_pages=k_pages, v_pages=v_pages),
            chunks.step,
            scale=scale,
            window=None,
        )
        out_NHV[:, heads] = out_NGD[..., :V]
    return out_NHV


def _expand_(
    k_GKD: torch.Tensor,
    v_GKV: torch.Tensor,
    entries_KE: torch.Tensor,
    key_up_GPL: torch.Tensor,
    value_up_GLV: torch.Tensor,
) -> None:
    """Compute the keys [W_UK c | r] and values c W_UV of entries [c | r]."""
    G, P, L = key_up_GPL.shape
    c_GKL = entries_KE[:, :L].expand(G, -1, -1)
    torch.bmm(c_GKL, key_up_GPL.mT, out=k_GKD[..., :P])
    k_GKD[..., P:] = entries_KE[:, L:]
    torch.bmm(c_GKL, value_up_GLV, out=v_GKV)
