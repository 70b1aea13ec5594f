"""Argument checks of the attention operations. Legend: see qkernels/ops.py."""

import functools

import torch

from qkernels.attention.cache import INT4_HEAD_DIMS, INT4_PAGES, PagedKv
from qkernels.checks import INDEX_DTYPES, check_float, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.operands.codes import CODE_DTYPES
from qkernels.operands.split_k import LinearOutput, SplitKPartials


def check_dense_heads(name: str, pages: torch.Tensor) -> None:
    """Raise KernelError unless the channels of a head are adjacent in memory."""
    if pages.stride(-1) != 1:
        raise KernelError(
            name,
            f"expected a last stride of 1, found {pages.stride(-1)}",
            "make the last dim contiguous",
        )


def check_split_k_heads(op: str, *heads: LinearOutput) -> None:
    """Raise KernelError unless q, k and v are all tensors, or split-K sums of one product."""
    split = [x.parts for x in heads if isinstance(x, SplitKPartials)]
    layouts = {(parts.shape[0], parts.stride(0), parts.stride(-1)) for parts in split}
    if split and (len(split) < len(heads) or len(layouts) > 1 or split[0].stride(-1) != 1):
        raise KernelError(
            f"{op} q, k, v",
            "expected tensors, or all split-K sums of one product",
            "make them by split_heads",
        )


def check_rope(
    op: str,
    q_THD: LinearOutput,
    k_TJD: LinearOutput,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    parts: bool = False,
) -> None:
    """Raise KernelError unless q, k, the cos/sin table and the positions fit.

    With `parts`, q and k may also be split-K partial sums.
    """
    check_float(f"{op} q", q_THD, parts)
    tokens, _, head_dim = expect_ndim(f"{op} q", q_THD, 3)
    check_tensor(f"{op} k", k_TJD, (tokens, None, head_dim), (q_THD.dtype,), q_THD)
    check_tensor(f"{op} cos_sin", cos_sin, (None, None), (torch.float32,), q_THD)
    if cos_sin.shape[1] > head_dim or cos_sin.shape[1] % 2:
        raise KernelError(
            f"{op} cos_sin",
            f"expected an even width up to {head_dim}, found {cos_sin.shape[1]}",
            "pass the table of this head_dim",
        )
    check_tensor(f"{op} positions", positions_T, (tokens,), INDEX_DTYPES, q_THD)


def check_kv_write(
    op: str,
    k_TJD: LinearOutput,
    v_TJD: LinearOutput,
    cache: PagedKv,
    slots_T: torch.Tensor,
    parts: bool = False,
) -> None:
    """Raise KernelError unless k, v, the pages and the slots fit.

    With `parts`, k and v may also be split-K partial sums.
    """
    check_float(f"{op} k", k_TJD, parts)
    tokens, heads, head_dim = expect_ndim(f"{op} k", k_TJD, 3)
    check_tensor(f"{op} v", v_TJD, (tokens, heads, head_dim), (k_TJD.dtype,), k_TJD)
    dtypes = (k_TJD.dtype, *CODE_DTYPES.values())
    check_cache(op, k_TJD, cache, heads, head_dim, dtypes)
    check_tensor(f"{op} slots", slots_T, (tokens,), INDEX_DTYPES, k_TJD)


def check_cache(
    op: str,
    x: LinearOutput,
    cache: PagedKv,
    heads: int | None,
    head_dim: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise KernelError unless key and value pages match; 8-bit pages must have scales, others
    none.
    """
    k_pages, v_pages = cache.k_pages, cache.v_pages
    if cache.is_4bit:
        check_4bit_cache(op, x, cache, heads, head_dim)
        return
    check_tensor(f"{op} k_pages", k_pages, (None, None, heads, head_dim), dtypes, x)
    check_tensor(f"{op} v_pages", v_pages, k_pages.shape, (k_pages.dtype,), x)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_dense_heads(f"{op} {name}", pages)
    kv_8bit = k_pages.dtype in CODE_DTYPES.values()
    for name, scales in (("k_scales", cache.k_scales), ("v_scales", cache.v_scales)):
        if (scales is not None) != kv_8bit:
            expected = "one for each slot and KV head" if kv_8bit else "None"
            found = "None" if kv_8bit else "some"
            raise KernelError(
                f"{op} {name}",
                f"expected {expected} for {k_pages.dtype} pages, found {found}",
                "pass scales for 8-bit pages only",
            )
        if kv_8bit:
            check_tensor(f"{op} {name}", scales, k_pages.shape[:3], (torch.float32,), x)


def check_4bit_cache(
    op: str, x: LinearOutput, cache: PagedKv, heads: int | None, head_dim: int
) -> None:
    """Raise KernelError unless pages, scales and head dim fit 4-bit codes."""
    if refusal := refuses_4bit_heads(head_dim):
        raise KernelError(f"{op} k_pages", refusal, "use int8 pages")
    shape = (None, None, heads, head_dim // 2)
    check_tensor(f"{op} k_pages", cache.k_pages, shape, (INT4_PAGES,), x)
    check_tensor(f"{op} v_pages", cache.v_pages, cache.k_pages.shape, (INT4_PAGES,), x)
    for name in ("k_pages", "v_pages"):
        check_dense_heads(f"{op} {name}", getattr(cache, name))
    for name, count in (("k_scales", 4), ("v_scales", 2)):
        pairs = getattr(cache, name)
        if pairs is None:
            expected = "scales and zeros for each slot and KV head"
            raise KernelError(
                f"{op} {name}",
                f"expected {expected} with 4-bit pages, found None",
                "pass them with the pages",
            )
        shape = (*cache.k_pages.shape[:3], count)
        check_tensor(f"{op} {name}", pairs, shape, (torch.float16,), x)
        check_dense_heads(f"{op} {name}", pairs)
    if cache.static_scales:
        raise KernelError(
            f"{op} static_scales", "expected False with 4-bit pages, found True", "leave it out"
        )


def refuses_4bit_heads(head_dim: int) -> str | None:
    """Return why 4-bit pages cannot hold heads of this size; None: they can."""
    if head_dim in INT4_HEAD_DIMS:
        return None
    sizes = ", ".join(map(str, INT4_HEAD_DIMS))
    return f"4-bit pages take heads of {sizes}, rotated by a Hadamard matrix, not {head_dim}"


def can_use_tma(*tensors: torch.Tensor) -> bool:
    """Return True if TMA can address the tensors: address and strides in multiples of 16 bytes."""
    return all(
        tensor.data_ptr() % 16 == 0 and _rows_are_aligned(tensor.stride(), tensor.element_size())
        for tensor in tensors
    )


@functools.lru_cache(maxsize=4096)
def _rows_are_aligned(strides: tuple[int, ...], element_size: int) -> bool:
    return all(stride * element_size % 16 == 0 for stride in strides[:-1])
