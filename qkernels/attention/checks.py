"""Argument checks of attention's operations. Legend as in ops.py."""

import functools

import torch

from qkernels.checks import INDEX_DTYPES, check_float, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.operands.codes import CODE_DTYPES
from qkernels.operands.split_k import LinearOutput, SplitKPartials


def check_dense_heads(name: str, pages: torch.Tensor) -> None:
    if pages.stride(-1) != 1:
        raise KernelError(name, f"expected a last stride of 1, found {pages.stride(-1)}")


def check_heads_in_parts(op: str, *heads: LinearOutput) -> None:
    """Raise KernelError unless q, k and v are all tensors, or all split-K sums of one product."""
    in_parts = [x.parts for x in heads if isinstance(x, SplitKPartials)]
    places = {(parts.shape[0], parts.stride(0), parts.stride(-1)) for parts in in_parts}
    if in_parts and (len(in_parts) < len(heads) or len(places) > 1 or in_parts[0].stride(-1) != 1):
        raise KernelError(
            f"{op} q, k, v",
            "expected tensors, or all in parts of one product",
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
    check_float(f"{op} q", q_THD, parts)
    tokens, _, head_dim = expect_ndim(f"{op} q", q_THD, 3)
    check_tensor(f"{op} k", k_TJD, (tokens, None, head_dim), (q_THD.dtype,), q_THD)
    check_tensor(f"{op} cos_sin", cos_sin, (None, None), (torch.float32,), q_THD)
    if cos_sin.shape[1] > head_dim or cos_sin.shape[1] % 2:
        raise KernelError(
            f"{op} cos_sin", f"expected an even width up to {head_dim}, found {cos_sin.shape[1]}"
        )
    check_tensor(f"{op} positions", positions_T, (tokens,), INDEX_DTYPES, q_THD)


def check_kv_write(
    op: str,
    k_TJD: LinearOutput,
    v_TJD: LinearOutput,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    slots_T: torch.Tensor,
    parts: bool = False,
) -> None:
    check_float(f"{op} k", k_TJD, parts)
    tokens, heads, head_dim = expect_ndim(f"{op} k", k_TJD, 3)
    check_tensor(f"{op} v", v_TJD, (tokens, heads, head_dim), (k_TJD.dtype,), k_TJD)
    dtypes = (k_TJD.dtype, *CODE_DTYPES.values())
    check_tensor(f"{op} k_pages", k_pages_PBJD, (None, None, heads, head_dim), dtypes, k_TJD)
    check_tensor(f"{op} v_pages", v_pages_PBJD, k_pages_PBJD.shape, (k_pages_PBJD.dtype,), k_TJD)
    check_tensor(f"{op} slots", slots_T, (tokens,), INDEX_DTYPES, k_TJD)
    for name, pages in (("k_pages", k_pages_PBJD), ("v_pages", v_pages_PBJD)):
        check_dense_heads(f"{op} {name}", pages)


def check_scales(
    op: str,
    x: LinearOutput,
    pages_PBJD: torch.Tensor,
    k_scales_PBJ: torch.Tensor | None,
    v_scales_PBJ: torch.Tensor | None,
) -> None:
    """Raise KernelError unless 8-bit pages, and only they, have scales."""
    kv_8bit = pages_PBJD.dtype in CODE_DTYPES.values()
    for name, scales in (("k_scales", k_scales_PBJ), ("v_scales", v_scales_PBJ)):
        if (scales is not None) != kv_8bit:
            expected = "one for each slot and KV head" if kv_8bit else "None"
            found = "None" if kv_8bit else "some"
            raise KernelError(
                f"{op} {name}", f"expected {expected} for {pages_PBJD.dtype} pages, found {found}"
            )
        if kv_8bit:
            check_tensor(f"{op} {name}", scales, pages_PBJD.shape[:3], (torch.float32,), x)


def can_use_tma(*tensors: torch.Tensor) -> bool:
    """Whether TMA can address the tensors: address and strides are multiples of 16 bytes."""
    return all(
        tensor.data_ptr() % 16 == 0 and _rows_are_aligned(tensor.stride(), tensor.element_size())
        for tensor in tensors
    )


@functools.lru_cache(maxsize=4096)
def _rows_are_aligned(strides: tuple[int, ...], element_size: int) -> bool:
    return all(stride * element_size % 16 == 0 for stride in strides[:-1])
