"""Writes of latents and attention over them: each checks its arguments, then runs a kernel.

    T  tokens of a step     E  numbers of an entry
    R  requests             L  numbers of its latent
    H  query heads          R  numbers of its rotated key
    P  pages                B  tokens of a page

In expanded attention: N rows, P numbers of a query without RoPE, V numbers of a value.
"""

import torch

from qkernels import dispatch
from qkernels.attention.cache import AttentionStep
from qkernels.checks import INDEX_DTYPES, check_float, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.latent import rows
from qkernels.latent.cache import PagedLatents, is_aligned
from qkernels.latent.expanded import ExpandedChunks, expanded_attention
from qkernels.operands.codes import CODE_DTYPES
from qkernels.problem import FLOAT_DTYPES


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
    kernel: str | None = None,
) -> torch.Tensor:
    """Write the entries of tokens, and return their queries [T, H, E] for latent_attention.

    `made_TE` holds each token's latent, which is normalized (RMS), then its key, which is rotated.
    Both are written to the token's slot, page * B + offset; if the pages have scales, in 8 bits
    with one scale each. Slot -1 is padding; other slots must differ. The last E - L numbers of the
    result are the rotated queries; the caller fills in the first L, the absorbed part. `cos_sin`
    and `interleaved` are those of apply_rope; all R channels are rotated.
    """
    op = "rope_write_latents_"
    check_float(f"{op} made", made_TE)
    T, E = expect_ndim(f"{op} made", made_TE, 2)
    (L,) = expect_ndim(f"{op} norm", norm_L, 1)
    check_tensor(f"{op} norm", norm_L, (L,), FLOAT_DTYPES, made_TE)
    check_tensor(f"{op} q", q_THR, (T, None, E - L), (made_TE.dtype,), made_TE)
    check_tensor(f"{op} cos_sin", cos_sin, (None, E - L), (torch.float32,), made_TE)
    _check_pages(op, cache, E, made_TE)
    for name, indices in (("positions", positions_T), ("slots", slots_T)):
        check_tensor(f"{op} {name}", indices, (T,), INDEX_DTYPES, made_TE)
    run = dispatch.implementation(
        rows.ROPE_WRITE_LATENTS,
        device=made_TE.device.type,
        dtype=made_TE.dtype,
        requested=kernel,
        head_dim=E,
        pages_dtype=cache.pages.dtype,
        tma_pages=is_aligned(E, L),
    )
    return run(
        q_THR,
        made_TE,
        norm_L,
        cos_sin,
        positions_T,
        cache,
        slots_T,
        eps=eps,
        interleaved=interleaved,
    )


def latent_attention(
    q_THE: torch.Tensor,
    cache: PagedLatents,
    step: AttentionStep,
    *,
    latent_width: int,
    scale: float,
    kernel: str | None = None,
) -> torch.Tensor:
    """Return causal attention of every request's query rows over its entries: [T, H, L].

    All heads read the same entries [E]: the whole entry is the key, its first L = `latent_width`
    numbers are the value. Row i of a request with `count` rows has position context_length - count
    + i; its entry must already be in the pages. Rows beyond the last request are unspecified on a
    GPU. `kernel` requests a row of latent/rows.py, or forbids some with a leading minus.
    """
    op = "latent_attention"
    check_float(f"{op} q", q_THE)
    _, _, E = expect_ndim(f"{op} q", q_THE, 3)
    _check_pages(op, cache, E, q_THE)
    if not 1 <= latent_width < E:
        raise KernelError(
            f"{op} latent_width",
            f"expected 1 to {E - 1}, found {latent_width}",
            "pass the width without the rotated part",
        )
    requests = step.context_lengths_R.shape[0]
    for name, shape in (
        ("block_tables_RX", (requests, None)),
        ("query_starts_R1", (requests + 1,)),
        ("context_lengths_R", (requests,)),
    ):
        argument = f"{op} {name.rpartition('_')[0]}"
        check_tensor(argument, getattr(step, name), shape, (torch.int32,), q_THE)
    if step.last_keys_T is not None:
        raise KernelError(
            f"{op} last_keys", "expected None, found rows that see later keys", "leave it out"
        )
    num_pages = step.block_tables_RX.shape[1]
    if step.max_context_len > num_pages * cache.page_size:
        raise KernelError(
            f"{op} max_context_len",
            f"{step.max_context_len} keys do not fit in {num_pages} pages of {cache.page_size}",
            "pass longer block tables",
        )
    run = dispatch.implementation(
        rows.LATENT_ATTENTION,
        device=q_THE.device.type,
        dtype=q_THE.dtype,
        requested=kernel,
        head_dim=E,
        latent_width=latent_width,
        page_size=cache.page_size,
        pages_dtype=cache.pages.dtype,
        tma_pages=is_aligned(E, latent_width),
    )
    return run(q_THE, cache, step, latent_width=latent_width, scale=scale)


def expanded_latent_attention(
    q_NHD: torch.Tensor,
    cache: PagedLatents,
    chunks: ExpandedChunks,
    key_up_HPL: torch.Tensor,
    value_up_HLV: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Return causal attention of chunk rows [N, H, P + R] with keys and values per head: [N, H, V].

    Apart from rounding, the result equals latent_attention with queries [q_n W_UK | q_r],
    multiplied by W_UV. q_n are the first P numbers of a query, `key_up_HPL` is W_UK, `value_up_HLV`
    is W_UV. It is faster for many rows (expanded.expanded_rows).
    """
    op = "expanded_latent_attention"
    check_float(f"{op} q", q_NHD)
    _, H, width = expect_ndim(f"{op} q", q_NHD, 3)
    _, P, L = expect_ndim(f"{op} key_up", key_up_HPL, 3)
    dtypes = (q_NHD.dtype,)
    check_tensor(f"{op} key_up", key_up_HPL, (H, None, None), dtypes, q_NHD)
    check_tensor(f"{op} value_up", value_up_HLV, (H, L, None), dtypes, q_NHD)
    if not 1 <= P < width:
        raise KernelError(
            f"{op} key_up",
            f"expected 1 to {width - 1} keys of a head, found {P}",
            "pass the matrix of one head's keys",
        )
    _check_pages(op, cache, L + width - P, q_NHD)
    check_tensor(f"{op} pages", chunks.pages_X, (None,), (torch.int64,), q_NHD)
    return expanded_attention(q_NHD, cache, chunks, key_up_HPL, value_up_HLV, scale=scale)


def _check_pages(op: str, cache: PagedLatents, width: int, like: torch.Tensor) -> None:
    dtypes = (like.dtype, *CODE_DTYPES.values())
    check_tensor(f"{op} pages", cache.pages, (None, None, width), dtypes, like)
    if cache.pages.dtype.itemsize == 1:
        if cache.scales is None:
            raise KernelError(
                f"{op} scales",
                f"expected scales of {cache.pages.dtype} pages, found none",
                "pass them with the pages",
            )
        shape = (*cache.pages.shape[:2], 2)
        check_tensor(f"{op} scales", cache.scales, shape, (torch.float32,), like)
    for name, tensor in (("pages", cache.pages), ("scales", cache.scales)):
        if tensor is not None and not tensor.is_contiguous():
            raise KernelError(
                f"{op} {name}",
                f"expected contiguous, found {tensor.stride()}",
                "make it contiguous",
            )
