"""Argument checks of the operations: shapes, dtypes and devices.

Every function takes the argument's name, which its KernelError shows.
"""

from typing import Any

import torch

from qkernels.errors import KernelError
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import LinearOutput, SplitKPartials
from qkernels.problem import FLOAT_DTYPES, HALF_DTYPES

INDEX_DTYPES = (torch.int32, torch.int64)


def expect_ndim(name: str, tensor: LinearOutput, ndim: int) -> torch.Size:
    """Return the shape. Raises KernelError if the tensor does not have `ndim` dims."""
    if tensor.ndim != ndim:
        raise KernelError(name, f"expected {ndim} dims, found {list(tensor.shape)}", "reshape it")
    return tensor.shape


def check_numbers(name: str, value: Any, expected: str) -> None:
    """Raise KernelError unless `value` is a dense tensor with data. `expected`: as in the error."""
    if not isinstance(value, torch.Tensor):
        is_array = hasattr(value, "__array__")
        remedy = "torch.from_numpy converts an array" if is_array else "pass a torch tensor"
        found = type(value).__name__
        raise KernelError(name, f"expected {expected}, found {found}", remedy)
    if value.is_meta:
        raise KernelError(name, "is on the meta device, without numbers", "load its weights")
    if value.layout is not torch.strided:
        raise KernelError(name, f"has the layout {value.layout}", "convert it with .to_dense()")


def check_float(name: str, tensor: LinearOutput, parts: bool = False) -> None:
    """Raise KernelError unless `tensor` is a float tensor.

    With `parts`, split-K partial sums of a float tensor are accepted, too.
    """
    if isinstance(tensor, SplitKPartials) and not parts:
        raise KernelError(name, "expected a tensor, found split-K partial sums", "pass its total()")
    if tensor.dtype not in FLOAT_DTYPES:
        raise KernelError(
            name,
            f"expected float16, bfloat16 or float32, found {tensor.dtype}",
            "convert it with .to()",
        )


def check_tensor(
    name: str,
    tensor: LinearOutput,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    like: LinearOutput,
) -> None:
    """Raise KernelError unless shape, dtype and device are as expected.

    None in `shape` accepts any size. The expected device is the one of `like`.
    """
    found = tensor.shape
    if found != shape and not _fits(found, shape):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise KernelError(
            name, f"expected [{wanted}], found {list(found)}", "pass a tensor of this shape"
        )
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise KernelError(name, f"expected {wanted}, found {tensor.dtype}", "convert it with .to()")
    if tensor.device != like.device:
        raise KernelError(
            name, f"expected device {like.device}, found {tensor.device}", "move it with .to()"
        )


def _fits(found: torch.Size, wanted: tuple[int | None, ...]) -> bool:
    if len(found) != len(wanted):
        return False
    for have, want in zip(found, wanted, strict=True):
        if want is not None and have != want:
            return False
    return True


def check_norm(name: str, weight_C: torch.Tensor | None, x: LinearOutput) -> None:
    """Raise KernelError unless the norm weight has x's channels, in x's dtype or float32."""
    if weight_C is not None:
        check_tensor(name, weight_C, x.shape[-1:], (x.dtype, torch.float32), x)


def check_limb_rows(
    name: str, x: LinearOutput, inputs: int, form: LimbForm, parts: bool = False
) -> None:
    """Raise KernelError unless rows of `inputs` numbers of x can be converted to limbs."""
    check_float(name, x, parts)
    if x.dtype not in HALF_DTYPES:
        raise KernelError(
            name, f"expected float16 or bfloat16, found {x.dtype}", "convert it with .to()"
        )
    reason = form.refuses(x.shape[0], inputs)
    if reason is not None:
        raise KernelError(
            name, f"{reason}, found {list(x.shape)}", "pass fewer rows, or give x as a tensor"
        )
