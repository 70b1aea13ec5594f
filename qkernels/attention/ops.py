"""Rotary embedding, KV writes and paged attention: each checks its arguments, then runs a kernel.

Legend: see qkernels/ops.py.
"""

import math
from collections.abc import Callable

import torch

from qkernels import dispatch
from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.checks import (
    can_use_tma,
    check_cache,
    check_kv_write,
    check_rope,
    check_split_k_heads,
)
from qkernels.attention.config import DECODE_MAX_ROWS, takes_gluon
from qkernels.attention.rows import APPLY_ROPE, PAGED_ATTENTION, ROPE_WRITE_KV, WRITE_KV
from qkernels.checks import check_float, check_limb_rows, check_norm, check_tensor, expect_ndim
from qkernels.choice import FIXED_ORDER
from qkernels.errors import KernelError
from qkernels.operands.codes import CODE_DTYPES
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import LinearOutput
from qkernels.rowwise import ops as rowwise


def apply_rope(
    q_THD: torch.Tensor,
    k_TJD: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions; return both as new tensors.

    `cos_sin` [max position, width], float32, holds the cosines in its first half and the sines in
    its second. If `width` is less than D, the other channels are copied. A pair is channels c and c
    + width/2, or with `interleaved` channels 2 c and 2 c + 1.
    """
    check_rope("apply_rope", q_THD, k_TJD, cos_sin, positions_T)
    run = dispatch.implementation(APPLY_ROPE, device=q_THD.device.type, dtype=q_THD.dtype)
    return run(q_THD, k_TJD, cos_sin, positions_T, interleaved)


def write_kv_(
    k_TJD: torch.Tensor,
    v_TJD: torch.Tensor,
    cache: PagedKv,
    slots_T: torch.Tensor,
) -> None:
    """Write keys and values into their slots of the pages, in place.

    A slot is page * B + offset. Slots must differ, except that a token with slot -1 is padding and
    is not written. Pages hold k's dtype, or int8 or float8_e4m3fn codes with a float32 scale for
    each slot and KV head: the row's largest magnitude divided by the largest code. This scale is
    written, too. With `static_scales`, rows are rounded with the existing scales.
    """
    op = "write_kv_"
    check_kv_write(op, k_TJD, v_TJD, cache, slots_T)
    _writer(WRITE_KV, k_TJD, cache)(k_TJD, v_TJD, cache, slots_T)


def rope_write_kv_(
    q_THD: LinearOutput,
    k_TJD: LinearOutput,
    v_TJD: LinearOutput,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    cache: PagedKv,
    slots_T: torch.Tensor,
    *,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    query_scales: torch.Tensor | None = None,
    inputs_ready: bool = False,
) -> torch.Tensor:
    """Run apply_rope, then write_kv_ with the rotated keys, in one pass.

    Return the rotated queries.

    With `q_norm_D` and `k_norm_D`, each head is first normalized by an RMS norm. Rotated queries
    are multiplied by `query_scales` [max position], float32, at their positions. `inputs_ready`
    says that `positions_T` and `slots_T` were complete before the previous kernel started, so that
    they may be read while it still runs.
    """
    op = "rope_write_kv_"
    check_split_k_heads(op, q_THD, k_TJD, v_TJD)
    check_rope(op, q_THD, k_TJD, cos_sin, positions_T, parts=True)
    check_kv_write(op, k_TJD, v_TJD, cache, slots_T, parts=True)
    if (q_norm_D is None) != (k_norm_D is None):
        raise KernelError(
            f"{op} norms", "expected one for q and one for k, or none", "pass both norms or none"
        )
    if q_norm_D is not None:
        for name, norm in (("q_norm", q_norm_D), ("k_norm", k_norm_D)):
            check_norm(f"{op} {name}", norm, q_THD)
    if query_scales is not None:
        shape = (cos_sin.shape[0],)
        check_tensor(f"{op} query_scales", query_scales, shape, (torch.float32,), q_THD)
    return _writer(ROPE_WRITE_KV, q_THD, cache)(
        q_THD,
        k_TJD,
        v_TJD,
        cos_sin,
        positions_T,
        cache,
        slots_T,
        q_norm_D=q_norm_D,
        k_norm_D=k_norm_D,
        eps=eps,
        interleaved=interleaved,
        query_scales=query_scales,
        inputs_ready=inputs_ready,
    )


def paged_attention(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    slopes_H: torch.Tensor | None = None,
    chunk_size: int | None = None,
    limbs: LimbForm | None = None,
    inputs_ready: bool = False,
    kernel: str | None = None,
) -> torch.Tensor | Limbs:
    """Return causal attention of every request's query rows over its paged keys: [T, H, D].

    window        a row sees itself and the window - 1 keys before it; None: all before it
    soft_cap      scores become soft_cap * tanh(score / soft_cap), as in Gemma 2
    sinks         float32 [H]: score of one more key per head, whose value is zero (gpt-oss)
    slopes        float32 [H]: ALiBi, slope * (key's position - row's position) is added to scores
    chunk_size    a row at position p sees the keys from p - p % chunk_size on (Llama 4); None: all
    limbs         return the result [T, H D] as limbs, for the next linear
    inputs_ready  the tensors of `step` were complete before the previous kernel started, so they
                  may be read while it still runs
    kernel        names a row of attention/rows.py, or excludes rows with a leading minus

    Row i of a request with `count` rows has position context_length - count + i; its key must
    already be in the pages. Rows that see no key are zero. Rows beyond the last request are
    unspecified on a GPU.
    """
    check_float("paged_attention q", q_THD)
    _, heads, head_dim = expect_ndim("paged_attention q", q_THD, 3)
    dtypes = (q_THD.dtype, *CODE_DTYPES.values())
    check_cache("paged_attention", q_THD, cache, None, head_dim, dtypes)
    kv_heads, page_size = cache.num_kv_heads, cache.page_size
    if kv_heads == 0 or heads % kv_heads:
        raise KernelError(
            "paged_attention q",
            f"expected heads divisible by the {kv_heads} KV heads, found {heads}",
            "pass q with these heads",
        )
    if limbs is not None:
        check_limb_rows("paged_attention q", q_THD, heads * head_dim, limbs)
    requests = step.context_lengths_R.shape[0]
    for name, shape in (
        ("block_tables_RX", (requests, None)),
        ("query_starts_R1", (requests + 1,)),
        ("context_lengths_R", (requests,)),
    ):
        argument = f"paged_attention {name.rpartition('_')[0]}"
        check_tensor(argument, getattr(step, name), shape, (torch.int32,), q_THD)
    if window is not None and window < 1:
        raise KernelError(
            "paged_attention window",
            f"expected None or at least 1, found {window}",
            "pass None for no window",
        )
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelError(
            "paged_attention soft_cap",
            f"expected None or a number above 0, found {soft_cap}",
            "pass None for no cap",
        )
    if sinks_H is not None:
        check_tensor("paged_attention sinks", sinks_H, (heads,), (torch.float32,), q_THD)
    if slopes_H is not None:
        check_tensor("paged_attention slopes", slopes_H, (heads,), (torch.float32,), q_THD)
    if chunk_size is not None and (chunk_size < 1 or window is not None):
        raise KernelError(
            "paged_attention chunk_size",
            f"expected None, or at least 1 without a window, found {chunk_size}",
            "pass None for no chunks",
        )
    num_pages = step.block_tables_RX.shape[1]
    if step.max_context_len > num_pages * page_size:
        raise KernelError(
            "paged_attention max_context_len",
            f"{step.max_context_len} keys do not fit in {num_pages} pages of {page_size}",
            "pass longer block tables",
        )
    options = {
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "inputs_ready": inputs_ready,
        **_given(sinks_H=sinks_H, slopes_H=slopes_H, chunk_size=chunk_size),
    }
    if _is_divided(step, heads // kv_heads, cache, kernel):
        out = _attend_divided(q_THD, cache, step, kernel, options)
    else:
        out = _attention(q_THD, cache, step, kernel, options)(
            q_THD, cache, step, limbs=limbs, **options
        )
    if limbs is None or isinstance(out, Limbs):
        return out
    return rowwise.to_limbs(out.flatten(1), limbs)  # of the kernels, only merge_splits makes limbs


def _given(**options: object) -> dict[str, object]:
    """Return the options that are set: kernels that do not support an option do not take it."""
    return {name: value for name, value in options.items() if value is not None}


def _is_divided(step: AttentionStep, group: int, cache: PagedKv, kernel: str | None) -> bool:
    """Return True if the step's decodes run separately from its chunks, in a kernel for few rows.

    Kernels with a fixed order of sums compute each row alike, so they gain nothing. Over 8- and
    4-bit pages the portable kernel is slower than the one for chunks.
    """
    if step.decodes is None or step.last_keys_T is not None or kernel == FIXED_ORDER:
        return False
    rows, most_rows = group * step.decodes.max_query_len, group * step.max_query_len
    fits = cache.k_scales is None or takes_gluon(group, step.decodes.max_query_len)
    return fits and rows <= DECODE_MAX_ROWS < most_rows


def _attend_divided(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    kernel: str | None,
    options: dict[str, object],
) -> torch.Tensor:
    """Compute the decodes and the chunks of a step one after the other."""
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    rows = step.decodes.num_rows
    rows_of = (slice(None),) * 2 if rows is None else (slice(rows), slice(rows, None))
    for part, of in zip(step.divided(step.decodes), rows_of, strict=True):
        run = _attention(q_THD, cache, part, kernel, options)
        run(q_THD[of], cache, part, limbs=None, out_THD=out_THD[of], **options)
    return out_THD


def _attention(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    kernel: str | None,
    options: dict[str, object],
) -> Callable[..., torch.Tensor | Limbs]:
    """Return the kernel that computes a step."""
    if step.last_keys_T is not None and kernel != FIXED_ORDER:
        kernel = "reference"
    _, heads, head_dim = q_THD.shape
    chunk = heads // cache.num_kv_heads * step.max_query_len > DECODE_MAX_ROWS
    return dispatch.implementation(
        PAGED_ATTENTION,
        device=q_THD.device.type,
        dtype=q_THD.dtype,
        requested=kernel,
        head_dim=head_dim,
        page_size=cache.page_size,
        pages_dtype=cache.k_pages.dtype,
        soft_cap=options["soft_cap"] is not None,
        sinks="sinks_H" in options,
        alibi="slopes_H" in options,
        chunked="chunk_size" in options,
        chunk=chunk,
        tma_pages=not (chunk or kernel == FIXED_ORDER) or can_use_tma(cache.k_pages, cache.v_pages),
    )


def _writer(operation: dispatch.Operation, x_THD: LinearOutput, cache: PagedKv):
    return dispatch.implementation(
        operation,
        device=x_THD.device.type,
        dtype=x_THD.dtype,
        head_dim=x_THD.shape[-1],
        page_size=cache.page_size,
        pages_dtype=cache.k_pages.dtype,
    )
