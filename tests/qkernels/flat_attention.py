"""Attention's structs from separate tensors, for tests that make and change them one by one."""

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
    **options,
):
    step = AttentionStep(
        block_tables_RX=block_tables,
        query_starts_R1=query_starts,
        context_lengths_R=context_lengths,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
    )
    cache = paged_kv(k_pages, v_pages, k_scales, v_scales)
    return module.paged_attention(q, cache, step, **options)
