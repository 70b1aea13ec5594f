"""Operator classes: patterns that assign a trace's kernels to classes. The first match counts.

The patterns match names of kernels in qkernels/, torch and NVIDIA's libraries, and names of torch's
operators for traces of a CPU.
"""

import re

OTHER = "other"
CLASSES: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|all_?reduce|allgather|reduce_scatter_kernel|custom_ar"),
    ("sampling", r"_draw|draw_(few|many)|_pick|_scan_chunks|mass_of|softmax"),
    ("sampling", r"sample|argmax|topk|multinomial|_first_largest|_in_order|log_probab|bitonic"),
    ("drafts", r"_(fill|settle)_drafts|_spread_logits"),
    (
        "attention",
        r"attention|attend|_index_scores|_block_scores|merge_splits|flash|fmha|sdpa|scaled_dot",
    ),
    (
        "states",
        r"_(delta|mamba|channel|lacking)_rows|_chunk_(systems|scan)|_mamba_chunks|(causal|short)_conv"
        r"|_gated_(rms|group)_norm|(selective|channel)_scan|solve_triangular",
    ),
    ("rope, KV", r"rope|write_kv|rotar"),
    ("adapters", r"lora_(shrink|expand)"),
    ("experts", r"experts|_route|route_tokens|moe|_sort_pairs|_sum_pairs"),
    ("products", r"wna16|w[48]a(16|8)|gemm|gemv|cutlass|nvjet|xmma|cublas|sum_splits|split_?k"),
    ("products", r"::mm\b|addmm|::bmm|linear|matmul|dequantize(?!_pages)|prefetch"),
    ("norms", r"norm"),
    ("activation", r"silu|gelu|relu|_activate_|sigmoid"),
    ("quantize", r"quantize|to_limbs|encode|_to_int8"),
    ("embedding", r"embedding|indexSelect|index_select|gather|vectorized_gather"),
    ("copies", r"memcpy|memset|copy|::fill_|FillFunctor|::clamp|::to\b|cat\b|CatArray|index"),
    ("elementwise", r"elementwise|reduce_kernel|::add|::mul|::div|::sum|::max|::pow|::rsqrt"),
)
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in CLASSES)


def class_of(kernel: str) -> str:
    """Return the class of a kernel or operator."""
    for name, pattern in _COMPILED:
        if pattern.search(kernel):
            return name
    return OTHER
