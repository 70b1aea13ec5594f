"""Attention for transformers models, by the engine's attention kernel in batch-invariant mode.

Forward: the kernel for paged keys, on all sequences of a batch in one call, without padding.
Backward: the gradient of torch's scaled_dot_product_attention, recomputed from q, k and v.

Suffixes of tensor names:

    B: sequences (R in the engine's structures)
    T: tokens; of a padded row in BT, of all rows without padding in THD and TJD
    H: heads
    J: KV heads
    D: head dim
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from formats.errors import InputError
from qkernels import ops
from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.choice import FIXED_ORDER

NAME = "qserve"  # name of this implementation for set_attn_implementation
PAGE_SIZE = 16


def register() -> None:
    """Register this implementation in transformers."""
    AttentionInterface.register(NAME, engine_attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def engine_attention(
    module: nn.Module,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, J, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # [B, T]; False: padding
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, called by transformers. Returns [B, T, H, D], and None as weights."""
    _check(module, query, key, dropout, softcap, s_aux)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise InputError(
            f"{type(module).__name__} attention_mask",
            f"expected [batch, tokens], found {list(attention_mask.shape)}",
            f"the attention {NAME!r} supports only causal masks with padding",
        )
    if attention_mask is None:
        attention_mask = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool)
    mask_BT = attention_mask.to(query.device)
    # Rotated q and k are float32 (see Float32Rotary). The engine rounds them at this point.
    q, k = query.to(value.dtype), key.to(value.dtype)
    return _Attention.apply(q, k, value, mask_BT, scaling, sliding_window), None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """Return the mask for `engine_attention`: [B, T], False for padding; None: no padding."""
    return attention_mask


def _check(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    dropout: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> None:
    """Raise InputError for options that the kernel does not support."""
    kind = type(module).__name__
    for name, is_used in (
        ("dropout", dropout > 0),
        ("soft caps", softcap is not None),
        ("attention sinks", s_aux is not None),
        ("attention that is not causal", not getattr(module, "is_causal", True)),
    ):
        if is_used:
            raise InputError(
                f"{kind}: {name}", f"is not supported by the attention {NAME!r}", "use sdpa"
            )
    if query.shape[2] != key.shape[2]:
        raise InputError(
            kind,
            f"{query.shape[2]} queries over {key.shape[2]} keys: a KV cache is not supported by"
            f" the attention {NAME!r}",
            "generate with the engine, or pass use_cache=False",
        )


class _Attention(torch.autograd.Function):
    """The engine's kernel forward, the gradient of torch's attention backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask_BT: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, mask_BT)
        ctx.scale, ctx.window = scale, window
        rows = [each.transpose(1, 2)[mask_BT] for each in (q, k, v)]
        cache, step = _paged(*rows[1:], mask_BT.sum(1).tolist())
        out_THD = ops.paged_attention(
            rows[0], cache, step, scale=scale, window=window, kernel=FIXED_ORDER
        )
        out_BTHD = torch.zeros_like(q.transpose(1, 2))
        out_BTHD[mask_BT] = out_THD
        return out_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, mask_BT = ctx.saved_tensors
        place_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
        behind_TT = place_T[:, None] - place_T
        seen_TT = behind_TT >= 0
        if ctx.window is not None:
            seen_TT = seen_TT & (behind_TT < ctx.window)
        # A padding token attends to itself: without any key, softmax would be NaN.
        seen_BTT = (seen_TT & mask_BT[:, None]) | (behind_TT == 0)
        with torch.enable_grad():
            q, k, v = (each.detach().requires_grad_() for each in inputs)
            out = F.scaled_dot_product_attention(
                q, k, v, seen_BTT[:, None], scale=ctx.scale, enable_gqa=True
            )
            grad = (grad_BTHD * mask_BT[:, :, None, None]).transpose(1, 2)
            return *torch.autograd.grad(out, (q, k, v), grad), None, None, None


def _paged(
    k_TJD: torch.Tensor, v_TJD: torch.Tensor, lengths: list[int]
) -> tuple[PagedKv, AttentionStep]:
    """Return a paged cache with keys and values of these sequences, and a step that reads it."""
    device, (_, kv_heads, head_dim) = k_TJD.device, k_TJD.shape
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    shape = max(1, sum(counts)), PAGE_SIZE, kv_heads, head_dim
    cache = PagedKv.zeros(shape, k_TJD.dtype, device)
    tables = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
    first, places = 0, []
    for table, length, count in zip(tables, lengths, counts, strict=True):
        table[:count] = torch.arange(first, first + count)
        places.append(first * PAGE_SIZE + torch.arange(length))
        first += count
    slots_T = torch.cat(places).to(device)
    cache.k_pages.view(-1, kv_heads, head_dim)[slots_T] = k_TJD
    cache.v_pages.view(-1, kv_heads, head_dim)[slots_T] = v_TJD
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    step = AttentionStep(
        block_tables_RX=tables.to(device),
        query_starts_R1=starts.to(device),
        context_lengths_R=torch.tensor(lengths, dtype=torch.int32).to(device),
        max_query_len=max(lengths),
        max_context_len=max(lengths),
    )
    return cache, step
