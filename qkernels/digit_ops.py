"""The operations that make digits of a linear's input, and multiply them. Knows no kernel.

As ops.py, whose legend this is: each checks its arguments, then runs a kernel.
"""

import torch

from qkernels import dispatch
from qkernels.checks import check_digits, check_tensor
from qkernels.digits import DigitForm, Digits
from qkernels.errors import KernelError
from qkernels.prepared import PreparedWeight


def digit_form(weight: PreparedWeight, rows: int) -> DigitForm | None:
    """How `linear_digits` takes so many rows of inputs as digits; None: `linear` is as fast."""
    if weight.input_order is not None:
        return None
    form_of = getattr(dispatch.linear_module(weight.kernel), "digit_form", None)
    return None if form_of is None else form_of(weight, rows)


def input_digits(x_MK: torch.Tensor, form: DigitForm, kernel: str | None = None) -> Digits:
    """The inputs of a linear, float16 or bfloat16, as 8-bit digits (digits.py).

    What makes digits puts them into the device's workspace: one `linear_digits` must follow before
    anything else multiplies. `kernel` names a row of qkernels.dispatch instead of the best one.
    """
    check_digits("input_digits", x_MK, form)
    return _run("input_digits", x_MK, kernel)(x_MK, form)


def rms_norm_digits(
    x_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    form: DigitForm,
    kernel: str | None = None,
) -> Digits:
    """input_digits(rms_norm(x)) of x [M, C], in one pass."""
    op = "rms_norm_digits"
    check_digits(op, x_MC, form)
    check_tensor(f"{op} weight", weight_C, x_MC.shape[-1:], (x_MC.dtype,), x_MC)
    return _run(op, x_MC, kernel)(x_MC, weight_C, eps, form)


def add_rms_norm_digits(
    x_MC: torch.Tensor,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    form: DigitForm,
    kernel: str | None = None,
) -> tuple[Digits, torch.Tensor]:
    """Returns (input_digits(rms_norm(x + residual)), x + residual)."""
    op = "add_rms_norm_digits"
    check_digits(op, x_MC, form)
    check_tensor(f"{op} residual", residual_MC, x_MC.shape, (x_MC.dtype,), x_MC)
    check_tensor(f"{op} weight", weight_C, x_MC.shape[-1:], (x_MC.dtype,), x_MC)
    return _run(op, x_MC, kernel)(x_MC, residual_MC, weight_C, eps, form)


def silu_and_mul_digits(x_M2I: torch.Tensor, form: DigitForm, kernel: str | None = None) -> Digits:
    """input_digits(silu_and_mul(x)) of x [M, 2 I], gate beside up, in one pass."""
    check_digits("silu_and_mul_digits", x_M2I, form, halves=2)
    return _run("silu_and_mul_digits", x_M2I, kernel)(x_M2I, form)


def linear_digits(
    digits: Digits, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` of digits in the form that `digit_form` names: [M, N] in the weight's dtype."""
    if digits.words.device != weight.device or digits.in_features != weight.in_features:
        raise KernelError(
            "linear_digits digits",
            f"expected those of {weight.in_features} inputs on {weight.device},"
            f" found {digits.in_features} on {digits.words.device}",
        )
    if bias is not None:
        check_tensor(
            "linear_digits bias", bias, (weight.out_features,), (weight.dtype,), digits.words
        )
    run = getattr(dispatch.linear_module(weight.kernel), "linear_digits", None)
    if run is None or weight.input_order is not None:
        raise KernelError(
            "linear_digits weight",
            f"{weight.kernel} takes no digits" if run is None else "its inputs are reordered",
            "use ops.linear",
        )
    return run(digits, weight, bias)


def _run(op: str, x: torch.Tensor, kernel: str | None):
    return dispatch.implementation(
        op, device=x.device.type, dtype=x.dtype, requested=kernel, in_features=x.shape[1]
    )
