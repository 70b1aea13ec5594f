"""Causal convolutions over time: each operation checks its arguments, then runs a kernel.

T  tokens of a step               W  taps
R  requests                       P  state slots
C  channels of the convolution    L  inputs that a slot keeps
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
    conv_PCL: torch.Tensor,
    step: StateStep,
    kernel: str | None = None,
) -> torch.Tensor:
    """Return silu of a convolution of each channel of x [T, C] over its request's last W inputs.

    `conv_PCL` keeps the newest L inputs of each slot: the input at position p is in column p % L.
    If L is W - 1 plus the rows of a step, a later step can compute again from any of these rows on.
    `kernel` requests a row of causal_conv/rows.py.
    """
    _check("causal_conv_", x_TC, 1, weight_CW, bias_C, conv_PCL, step)
    return _run(rows.CAUSAL_CONV, x_TC, weight_CW, bias_C, conv_PCL, step, kernel)


def short_conv_(
    mixed_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
    kernel: str | None = None,
) -> torch.Tensor:
    """Return c * conv(b * x), a convolution over a request's last W products b * x.

    `mixed_TC` [T, 3 C] is b, c and x, concatenated. `conv_PCL` keeps the products as `causal_conv_`
    keeps inputs.
    """
    _check("short_conv_", mixed_TC, 3, weight_CW, bias_C, conv_PCL, step)
    return _run(rows.SHORT_CONV, mixed_TC, weight_CW, bias_C, conv_PCL, step, kernel)


def lacking_rows_(
    covered_P: torch.Tensor, step: StateStep, most_rows: int, kernel: str | None = None
) -> torch.Tensor:
    """Return how many rows before the step the recurrent state of each request lacks, int32 [R].

    `covered_P`, int32, is the number of tokens that each slot's recurrent state includes. It is
    updated to the number after this step; rows of a verification (2 to `most_rows` rows, StateStep)
    do not count.
    """
    op = "lacking_rows_"
    check_step(op, step, step.slots_R)
    check_tensor(f"{op} covered", covered_P, (None,), (torch.int32,), step.slots_R)
    run = dispatch.implementation(
        rows.LACKING_ROWS,
        device=covered_P.device.type,
        dtype=covered_P.dtype,
        requested=kernel,
    )
    return run(covered_P, step, most_rows)


def check_recent(
    op: str, recent_PNI: torch.Tensor | None, inputs: int, step: StateStep, like: torch.Tensor
) -> None:
    """Raise KernelError unless the kept inputs of recent rows match the step."""
    if (recent_PNI is None) != (step.lacking_R is None):
        raise KernelError(
            f"{op} recent",
            "expected both recent and the step's lacking rows, or neither",
            "pass both or neither",
        )
    if recent_PNI is None:
        return
    check_tensor(f"{op} recent", recent_PNI, (None, None, inputs), (like.dtype,), like)
    check_dense(f"{op} recent", recent_PNI)
    if recent_PNI.shape[1] % 2:
        raise KernelError(
            f"{op} recent",
            f"expected an even N, found {recent_PNI.shape[1]}",
            "make N even",
        )
    (R,) = step.slots_R.shape
    check_tensor(f"{op} lacking", step.lacking_R, (R,), (torch.int32,), like)


def check_step(op: str, step: StateStep, like: torch.Tensor) -> None:
    """Raise KernelError unless the step's tensors match each other."""
    (R,) = expect_ndim(f"{op} slots", step.slots_R, 1)
    int32 = (torch.int32,)
    check_tensor(f"{op} slots", step.slots_R, (R,), int32, like)
    check_tensor(f"{op} query_starts", step.query_starts_R1, (R + 1,), int32, like)
    check_tensor(f"{op} context_lengths", step.context_lengths_R, (R,), int32, like)


def check_dense(name: str, states: torch.Tensor) -> None:
    """Raise KernelError unless states are contiguous."""
    if not states.is_contiguous():
        raise KernelError(
            name,
            f"expected contiguous states, found strides {states.stride()}",
            "make it contiguous",
        )


def _check(
    op: str,
    x: torch.Tensor,
    parts: int,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> None:
    check_float(f"{op} x", x)
    _, width = expect_ndim(f"{op} x", x, 2)
    C, rest = divmod(width, parts)
    if rest:
        raise KernelError(
            f"{op} mixed",
            f"expected b, c and x side by side, found {width} columns",
            "concatenate the three along channels",
        )
    check_tensor(f"{op} weight", weight_CW, (C, None), FLOAT_DTYPES, x)
    taps = weight_CW.shape[1]
    if not 2 <= taps <= 8:
        raise KernelError(
            f"{op} weight", f"expected 2 to 8 taps, found {taps}", "use a convolution of this width"
        )
    if bias_C is not None:
        check_tensor(f"{op} bias", bias_C, (C,), FLOAT_DTYPES, x)
    check_tensor(f"{op} conv", conv_PCL, (None, C, None), (x.dtype,), x)
    if conv_PCL.shape[2] < taps - 1:
        found = conv_PCL.shape[2]
        raise KernelError(
            f"{op} conv",
            f"expected {taps - 1} columns or more, found {found}",
            "pass longer states",
        )
    check_dense(f"{op} conv", conv_PCL)
    check_step(op, step, x)


def _run(
    operation: dispatch.Operation,
    x: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
    kernel: str | None,
) -> torch.Tensor:
    run = dispatch.implementation(operation, device=x.device.type, dtype=x.dtype, requested=kernel)
    return run(x, weight_CW, bias_C, conv_PCL, step)
