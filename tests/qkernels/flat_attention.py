"""Attention's structs from separate tensors, for tests that make and change them one by one."""

import torch

from qkernels.attention.cache import AttentionStep, PagedKv


def paged_kv(k_pages, v_pages, k_scales=None, v_scales=None, **options) -> PagedKv:
    return PagedKv(
        k_pages=k_pages, v_pages=v_pages, k_scales=k_scales, v_scales=v_scales, **options
    )


def run_attention(
    module,  # ops, reference, or that of a kernel
    q,
    k_pages,
    v_pages,
    block_tables,
    query_starts,
    context_lengths,
    *,
    max_query_len,
    max_context_len,
    k_scales=None,
    v_scales=None,
    last_keys=None,
    **options,
):
    step = AttentionStep(
        block_tables_RX=block_tables,
        query_starts_R1=query_starts,
        context_lengths_R=context_lengths,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        last_keys_T=last_keys,
    )
    cache = paged_kv(k_pages, v_pages, k_scales, v_scales)
    return module.paged_attention(q, cache, step, **options)


def exact_attention(q, k, v, count, length, scale, window, soft_cap, sinks, slopes, chunk_size):
    """One request in float64, head by head."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(count, *q.shape[1:], dtype=torch.float64)
    for i in range(count):
        position = length - count + i
        first = 0 if window is None else max(0, position - window + 1)
        if chunk_size is not None:
            first = position - position % chunk_size
        if position < 0:
            continue
        for head in range(q.shape[1]):
            keys, values = (t[first : position + 1, head // group].double() for t in (k, v))
            scores = keys @ q[i, head].double() * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if slopes is not None:
                distances = torch.arange(first - position, 1, dtype=torch.float64)
                scores = scores + slopes[head].double().cpu() * distances
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double().cpu()])
                values = torch.cat([values, values.new_zeros(1, values.shape[1])])
            out[i, head] = scores.softmax(0) @ values
    return out
