"""What operations expect of their tensors. Knows shapes, dtypes and devices, no kernel.

Each function takes the name that its KernelError gives the argument. Legend as in ops.py.
"""

import functools

import torch

from formats.scheme import ActivationSpec
from qkernels.digits import DigitForm
from qkernels.errors import KernelError
from qkernels.partial_sums import LinearOutput, PartialSums
from qkernels.prepared import PreparedWeight
from qkernels.supports import FLOAT_DTYPES, HALF_DTYPES

INDEX_DTYPES = (torch.int32, torch.int64)
CODE_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}


def expect_ndim(name: str, tensor: LinearOutput, ndim: int) -> torch.Size:
    if tensor.ndim != ndim:
        raise KernelError(name, f"expected {ndim} dims, found {list(tensor.shape)}")
    return tensor.shape


def check_float(name: str, tensor: LinearOutput, parts: bool = False) -> None:
    """`parts`: the operation adds parts of K itself."""
    if isinstance(tensor, PartialSums) and not parts:
        raise KernelError(
            name, "expected a tensor, found parts of one to be added", "take its total()"
        )
    if tensor.dtype not in FLOAT_DTYPES:
        raise KernelError(name, f"expected float16, bfloat16 or float32, found {tensor.dtype}")


def check_tensor(
    name: str,
    tensor: LinearOutput,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    beside: LinearOutput,
) -> None:
    """Raise KernelError unless shape (None: any), dtype and device (`beside`'s) are as expected."""
    found = tensor.shape
    if found != shape and not _fits(found, shape):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise KernelError(name, f"expected [{wanted}], found {list(found)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise KernelError(name, f"expected {wanted}, found {tensor.dtype}")
    if tensor.device != beside.device:
        raise KernelError(name, f"expected it on {beside.device}, found it on {tensor.device}")


def _fits(found: torch.Size, wanted: tuple[int | None, ...]) -> bool:
    if len(found) != len(wanted):
        return False
    for have, want in zip(found, wanted, strict=True):
        if want is not None and have != want:
            return False
    return True


def check_linear(x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> None:
    """Raise KernelError unless x [..., K] and bias [N] or None fit a weight."""
    check_float("linear x", x)
    if x.ndim == 0 or x.shape[-1] != weight.in_features:
        raise KernelError(
            "linear x", f"expected [..., {weight.in_features}], found {list(x.shape)}"
        )
    if x.dtype != weight.dtype or x.device != weight.device:
        raise KernelError(
            "linear x",
            f"expected {weight.dtype} on {weight.device}, found {x.dtype} on {x.device}",
            "prepare the weight for this dtype and device",
        )
    if bias is not None:
        check_tensor("linear bias", bias, (weight.out_features,), (x.dtype,), x)


def check_dense_heads(name: str, pages: torch.Tensor) -> None:
    if pages.stride(-1) != 1:
        raise KernelError(name, f"expected a last stride of 1, found {pages.stride(-1)}")


def check_quantized(
    op: str,
    x: LinearOutput,
    activation: ActivationSpec,
    scale: torch.Tensor | None,
    parts: bool = False,
) -> None:
    check_float(f"{op} x", x, parts)
    expect_ndim(f"{op} x", x, 2)
    if (scale is None) != activation.dynamic:
        expected = "None" if activation.dynamic else "one number"
        raise KernelError(f"{op} scale", f"expected {expected} for {activation}")
    if scale is not None:
        check_tensor(f"{op} scale", scale, (), (torch.float32,), x)


def check_digits(op: str, x: torch.Tensor, form: DigitForm, halves: int = 1) -> None:
    """Raise KernelError unless x [M, halves K] can become digits."""
    _, width = expect_ndim(f"{op} x", x, 2)
    if width % halves:
        raise KernelError(f"{op} x", f"an odd width, found {list(x.shape)}")
    check_digit_rows(f"{op} x", x, width // halves, form)


def check_digit_rows(name: str, x: torch.Tensor, inputs: int, form: DigitForm) -> None:
    """Raise KernelError unless rows of so many inputs, made of x's, can become digits."""
    check_float(name, x)
    if x.dtype not in HALF_DTYPES:
        raise KernelError(name, f"expected float16 or bfloat16, found {x.dtype}")
    reason = form.refuses(x.shape[0], inputs)
    if reason is not None:
        raise KernelError(name, f"{reason}, found {list(x.shape)}")


def check_heads_in_parts(op: str, *heads: LinearOutput) -> None:
    """Raise KernelError unless q, k and v are all tensors, or all in parts of one product."""
    in_parts = [x.parts for x in heads if isinstance(x, PartialSums)]
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
    """Raise KernelError unless 8-bit pages, and only they, have their scales."""
    coded = pages_PBJD.dtype in CODE_DTYPES.values()
    for name, scales in (("k_scales", k_scales_PBJ), ("v_scales", v_scales_PBJ)):
        if (scales is not None) != coded:
            expected = "one for each slot and KV head" if coded else "None"
            found = "None" if coded else "some"
            raise KernelError(
                f"{op} {name}", f"expected {expected} for {pages_PBJD.dtype} pages, found {found}"
            )
        if coded:
            check_tensor(f"{op} {name}", scales, pages_PBJD.shape[:3], (torch.float32,), x)


def can_copy_in_bulk(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine takes the address and the strides: multiples of 16 bytes."""
    return all(
        tensor.data_ptr() % 16 == 0 and _rows_are_aligned(tensor.stride(), tensor.element_size())
        for tensor in tensors
    )


@functools.lru_cache(maxsize=4096)
def _rows_are_aligned(strides: tuple[int, ...], element_size: int) -> bool:
    return all(stride * element_size % 16 == 0 for stride in strides[:-1])
