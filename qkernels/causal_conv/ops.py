"""Causal convolutions over time: each operation checks its arguments, then runs a kernel.

Legend: T tokens of a step, R requests, C channels of the convolution, W taps, P slots.
"""

import torch

from qkernels import dispatch
from qkernels.causal_conv import rows
from qkernels.causal_conv.state import StateStep
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.problem import FLOAT_DTYPES


def causal_conv_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    step: StateStep,
    kernel: str | None = None,
) -> torch.Tensor:
    """silu of a convolution of each channel of x [T, C] over its request's last W inputs.

    `conv` holds the W - 1 before the step, and afterwards those at its end. `kernel` names a row
    of causal_conv/rows.py instead of the best one.
    """
    _check("causal_conv_", x_TC, 1, weight_CW, bias_C, conv_PCW, step)
    return _run(rows.CAUSAL_CONV, x_TC, weight_CW, bias_C, conv_PCW, step, kernel)


def short_conv_(
    mixed_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    step: StateStep,
    kernel: str | None = None,
) -> torch.Tensor:
    """c * convolution of (b * x) over a request's last W products; `mixed` [T, 3 C] is b, c, x.

    `conv` holds the W - 1 products before the step, and afterwards those at its end.
    """
    _check("short_conv_", mixed_TC, 3, weight_CW, bias_C, conv_PCW, step)
    return _run(rows.SHORT_CONV, mixed_TC, weight_CW, bias_C, conv_PCW, step, kernel)


def check_step(op: str, step: StateStep, beside: torch.Tensor) -> None:
    """Raise KernelError for a step whose tensors do not match."""
    (R,) = expect_ndim(f"{op} slots", step.slots_R, 1)
    int32 = (torch.int32,)
    check_tensor(f"{op} slots", step.slots_R, (R,), int32, beside)
    check_tensor(f"{op} query_starts", step.query_starts_R1, (R + 1,), int32, beside)
    check_tensor(f"{op} context_lengths", step.context_lengths_R, (R,), int32, beside)


def check_dense(name: str, states: torch.Tensor) -> None:
    """Raise KernelError for states that are not contiguous."""
    if not states.is_contiguous():
        raise KernelError(name, f"expected contiguous states, found strides {states.stride()}")


def _check(
    op: str,
    x: torch.Tensor,
    parts: int,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    step: StateStep,
) -> None:
    check_float(f"{op} x", x)
    _, width = expect_ndim(f"{op} x", x, 2)
    C, rest = divmod(width, parts)
    if rest:
        raise KernelError(f"{op} mixed", f"expected b, c and x side by side, found {width} columns")
    check_tensor(f"{op} weight", weight_CW, (C, None), FLOAT_DTYPES, x)
    taps = weight_CW.shape[1]
    if not 2 <= taps <= 8:
        raise KernelError(f"{op} weight", f"expected 2 to 8 taps, found {taps}")
    if bias_C is not None:
        check_tensor(f"{op} bias", bias_C, (C,), FLOAT_DTYPES, x)
    check_tensor(f"{op} conv", conv_PCW, (None, C, taps - 1), (x.dtype,), x)
    check_dense(f"{op} conv", conv_PCW)
    check_step(op, step, x)


def _run(
    operation: dispatch.Operation,
    x: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    step: StateStep,
    kernel: str | None,
) -> torch.Tensor:
    run = dispatch.implementation(operation, device=x.device.type, dtype=x.dtype, requested=kernel)
    return run(x, weight_CW, bias_C, conv_PCW, step)
