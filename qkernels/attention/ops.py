"""Rotation, KV writes and paged attention: each checks its arguments, then runs a kernel.

Legend as in ops.py.
"""

import math

import torch

from qkernels import dispatch
from qkernels.attention.checks import (
    can_use_tma,
    check_dense_heads,
    check_heads_in_parts,
    check_kv_write,
    check_rope,
    check_scales,
)
from qkernels.attention.config import DECODE_MAX_ROWS
from qkernels.checks import check_float, check_limb_rows, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.operands.codes import CODE_DTYPES
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import LinearOutput


def apply_rope(
    q_THD: torch.Tensor,
    k_TJD: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions; both results are new.

    `cos_sin` [max position, width] holds cos in its first half and sin in its second, float32;
    `width` may be less than D, then the other channels pass through. Channels c and c + width/2
    make a pair.
    """
    check_rope("apply_rope", q_THD, k_TJD, cos_sin, positions_T)
    run = dispatch.implementation("apply_rope", device=q_THD.device.type, dtype=q_THD.dtype)
    return run(q_THD, k_TJD, cos_sin, positions_T)


def write_kv_(
    k_TJD: torch.Tensor,
    v_TJD: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    slots_T: torch.Tensor,
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    *,
    static_scales: bool = False,
) -> None:
    """Write keys and values into their slots of the pages, in place.

    slot = page * B + offset; a token whose slot is -1 is padding and written nowhere. Slots differ.

    Pages hold k's dtype, or codes: int8 or float8_e4m3fn, with a float32 scale for each slot and
    KV head. A row's scale is its largest magnitude over the largest code, and is written beside it;
    with `static_scales` the scales are there already, and rows are rounded with them. Scales have
    any strides: one for all slots is `scale.expand(P, B, J)`.
    """
    op = "write_kv_"
    check_kv_write(op, k_TJD, v_TJD, k_pages_PBJD, v_pages_PBJD, slots_T)
    check_scales(op, k_TJD, k_pages_PBJD, k_scales_PBJ, v_scales_PBJ)
    _run_pages(op, k_TJD, k_pages_PBJD)(
        k_TJD,
        v_TJD,
        k_pages_PBJD,
        v_pages_PBJD,
        slots_T,
        k_scales_PBJ,
        v_scales_PBJ,
        static_scales=static_scales,
    )


def rope_write_kv_(
    q_THD: LinearOutput,
    k_TJD: LinearOutput,
    v_TJD: LinearOutput,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    slots_T: torch.Tensor,
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    *,
    static_scales: bool = False,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    inputs_ready: bool = False,
) -> torch.Tensor:
    """apply_rope, then write_kv_ of the rotated keys, in one pass. Returns the rotated queries.

    With `q_norm_D` and `k_norm_D`, rms_norm over each head comes first. `inputs_ready` says that
    `positions` and `slots` were complete before the kernel in front of this one began, so that
    they may be read while it still runs.
    """
    op = "rope_write_kv_"
    check_heads_in_parts(op, q_THD, k_TJD, v_TJD)
    check_rope(op, q_THD, k_TJD, cos_sin, positions_T, parts=True)
    check_kv_write(op, k_TJD, v_TJD, k_pages_PBJD, v_pages_PBJD, slots_T, parts=True)
    check_scales(op, k_TJD, k_pages_PBJD, k_scales_PBJ, v_scales_PBJ)
    if (q_norm_D is None) != (k_norm_D is None):
        raise KernelError(f"{op} norms", "expected one for q and one for k, or none")
    if q_norm_D is not None:
        for name, norm in (("q_norm", q_norm_D), ("k_norm", k_norm_D)):
            check_tensor(f"{op} {name}", norm, q_THD.shape[-1:], (q_THD.dtype,), q_THD)
    return _run_pages(op, q_THD, k_pages_PBJD)(
        q_THD,
        k_TJD,
        v_TJD,
        cos_sin,
        positions_T,
        k_pages_PBJD,
        v_pages_PBJD,
        slots_T,
        k_scales_PBJ,
        v_scales_PBJ,
        static_scales=static_scales,
        q_norm_D=q_norm_D,
        k_norm_D=k_norm_D,
        eps=eps,
        inputs_ready=inputs_ready,
    )


def paged_attention(
    q_THD: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    block_tables_RX: torch.Tensor,
    query_starts_R1: torch.Tensor,
    context_lengths_R: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_len: int,
    max_context_len: int,
    soft_cap: float | None = None,
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    limbs: LimbForm | None = None,
    inputs_ready: bool = False,
    kernel: str | None = None,
) -> torch.Tensor | Limbs:
    """Causal attention of every request's query rows over its paged keys: [T, H, D].

    block_tables  [R, X] int32: the pages of each request, in order
    query_starts  [R + 1] int32: request r has the rows query_starts[r] .. query_starts[r + 1]
    context_lengths [R] int32: keys that the request's last row sees, itself included
    window        a row sees itself and the window - 1 keys before it; None: all before it
    soft_cap      scores become soft_cap * tanh(score / soft_cap), as in Gemma 2
    k_scales, v_scales  [P, B, J] float32: of int8 or float8_e4m3fn pages, as write_kv_ leaves them
    max_query_len, max_context_len  upper bounds that the host knows, so that nothing is read back
    limbs         return to_limbs of the result [T, H D] instead, for the linear that follows
    inputs_ready  query_starts and context_lengths were complete before the previous kernel began:
                  they may be read while it still runs
    kernel        asks for a row of qkernels.dispatch, or forbids some with a leading minus

    Row i of `count` stands at position context_length - count + i; its key must be in the pages
    already. Rows beyond the last request are unspecified on a GPU; rows that see nothing are zero.
    """
    check_float("paged_attention q", q_THD)
    _, heads, head_dim = expect_ndim("paged_attention q", q_THD, 3)
    pages_shape = (None, None, None, head_dim)
    dtypes = (q_THD.dtype, *CODE_DTYPES.values())
    check_tensor("paged_attention k_pages", k_pages_PBJD, pages_shape, dtypes, q_THD)
    v_dtypes = (k_pages_PBJD.dtype,)
    check_tensor("paged_attention v_pages", v_pages_PBJD, k_pages_PBJD.shape, v_dtypes, q_THD)
    check_scales("paged_attention", q_THD, k_pages_PBJD, k_scales_PBJ, v_scales_PBJ)
    for name, pages in (("k_pages", k_pages_PBJD), ("v_pages", v_pages_PBJD)):
        check_dense_heads(f"paged_attention {name}", pages)
    if k_pages_PBJD.shape[2] == 0 or heads % k_pages_PBJD.shape[2]:
        raise KernelError(
            "paged_attention q",
            f"expected heads divisible by the {k_pages_PBJD.shape[2]} KV heads, found {heads}",
        )
    if limbs is not None:
        check_limb_rows("paged_attention q", q_THD, heads * head_dim, limbs)
    requests = context_lengths_R.shape[0]
    int32 = (torch.int32,)
    check_tensor("paged_attention block_tables", block_tables_RX, (requests, None), int32, q_THD)
    check_tensor("paged_attention query_starts", query_starts_R1, (requests + 1,), int32, q_THD)
    check_tensor("paged_attention context_lengths", context_lengths_R, (requests,), int32, q_THD)
    if window is not None and window < 1:
        raise KernelError("paged_attention window", f"expected None or at least 1, found {window}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelError(
            "paged_attention soft_cap", f"expected None or a number above 0, found {soft_cap}"
        )
    if max_context_len > block_tables_RX.shape[1] * k_pages_PBJD.shape[1]:
        raise KernelError(
            "paged_attention max_context_len",
            f"{max_context_len} keys do not fit in {block_tables_RX.shape[1]} pages"
            f" of {k_pages_PBJD.shape[1]}",
        )
    chunk = heads // k_pages_PBJD.shape[2] * max_query_len > DECODE_MAX_ROWS
    run = dispatch.implementation(
        "paged_attention",
        device=q_THD.device.type,
        dtype=q_THD.dtype,
        requested=kernel,
        head_dim=head_dim,
        page_size=k_pages_PBJD.shape[1],
        pages_dtype=k_pages_PBJD.dtype,
        soft_cap=soft_cap is not None,
        chunk=chunk,
        tma_pages=not chunk or can_use_tma(k_pages_PBJD, v_pages_PBJD),
    )
    return run(
        q_THD,
        k_pages_PBJD,
        v_pages_PBJD,
        block_tables_RX,
        query_starts_R1,
        context_lengths_R,
        scale=scale,
        window=window,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        soft_cap=soft_cap,
        k_scales_PBJ=k_scales_PBJ,
        v_scales_PBJ=v_scales_PBJ,
        limbs=limbs,
        inputs_ready=inputs_ready,
    )


def _run_pages(op: str, x_THD: LinearOutput, pages_PBJD: torch.Tensor):
    return dispatch.implementation(
        op,
        device=x_THD.device.type,
        dtype=x_THD.dtype,
        head_dim=x_THD.shape[-1],
        page_size=pages_PBJD.shape[1],
        pages_dtype=pages_PBJD.dtype,
    )
