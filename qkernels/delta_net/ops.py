"""The operations of the gated delta net: each checks its arguments, then runs a kernel.

Legend: T tokens of a step, R requests, C channels of the convolution, W taps, P slots, J key heads,
H value heads, K key dim, V value dim.
"""

from typing import Any

import torch

from qkernels import dispatch
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.delta_net import rows
from qkernels.delta_net.state import StateStep
from qkernels.errors import KernelError
from qkernels.problem import FLOAT_DTYPES


def causal_conv_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    conv_PCW: torch.Tensor,
    step: StateStep,
    kernel: str | None = None,
) -> torch.Tensor:
    """silu of a convolution of each channel of x [T, C] over its request's last W inputs.

    `conv` holds the W - 1 before the step, and afterwards those at its end. `kernel` names a row
    of delta_net/rows.py instead of the best one.
    """
    op = "causal_conv_"
    check_float(f"{op} x", x_TC)
    _, C = expect_ndim(f"{op} x", x_TC, 2)
    check_tensor(f"{op} weight", weight_CW, (C, None), FLOAT_DTYPES, x_TC)
    taps = weight_CW.shape[1]
    if not 2 <= taps <= 8:
        raise KernelError(f"{op} weight", f"expected 2 to 8 taps, found {taps}")
    check_tensor(f"{op} conv", conv_PCW, (None, C, taps - 1), (x_TC.dtype,), x_TC)
    _check_dense(f"{op} conv", conv_PCW)
    _check_step(op, step, x_TC)
    return _run(rows.CAUSAL_CONV, x_TC, kernel)(x_TC, weight_CW, conv_PCW, step)


def delta_rule_(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHKV: torch.Tensor,
    step: StateStep,
    kernel: str | None = None,
) -> torch.Tensor:
    """Outputs [T, H, V]: what each token reads from its request's state after its own update.

    `mixed` [T, 2 J K + H V] is queries, keys and values; queries and keys are scaled to length 1
    here. A token writes as much as sigmoid(b) says, and keeps exp(-exp(a_log) softplus(a +
    dt_bias)) of what was there. `memory`, float32, is the states, changed in place.
    """
    op = "delta_rule_"
    check_float(f"{op} mixed", mixed_TC)
    T, C = expect_ndim(f"{op} mixed", mixed_TC, 2)
    check_tensor(f"{op} memory", memory_PHKV, (None,) * 4, (torch.float32,), mixed_TC)
    _check_dense(f"{op} memory", memory_PHKV)
    _, H, K, V = memory_PHKV.shape
    heads, rest = divmod(C - H * V, 2 * K)
    if rest or heads < 1 or H % heads:
        raise KernelError(
            f"{op} mixed",
            f"expected queries and keys of {K} channels for heads that divide {H}, and {H} x {V}"
            f" values, found {C} channels",
        )
    for name, x in (("b", b_TH), ("a", a_TH)):
        check_tensor(f"{op} {name}", x, (T, H), (mixed_TC.dtype,), mixed_TC)
    for name, x in (("a_log", a_log_H), ("dt_bias", dt_bias_H)):
        check_tensor(f"{op} {name}", x, (H,), (torch.float32,), mixed_TC)
    _check_step(op, step, mixed_TC)
    run = _run(rows.DELTA_RULE, mixed_TC, kernel, in_features=K, head_dim=V)
    return run(mixed_TC, b_TH, a_TH, a_log_H, dt_bias_H, memory_PHKV, step)


def gated_rms_norm(
    x_THV: torch.Tensor,
    z_THV: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    kernel: str | None = None,
) -> torch.Tensor:
    """x / rms(x) * weight * silu(z) of each head of x [T, H, V]."""
    op = "gated_rms_norm"
    check_float(f"{op} x", x_THV)
    shape = expect_ndim(f"{op} x", x_THV, 3)
    check_tensor(f"{op} z", z_THV, shape, (x_THV.dtype,), x_THV)
    check_tensor(f"{op} weight", weight_V, (shape[2],), (x_THV.dtype,), x_THV)
    return _run(rows.GATED_RMS_NORM, x_THV, kernel, head_dim=shape[2])(x_THV, z_THV, weight_V, eps)


def _run(operation: dispatch.Operation, x: torch.Tensor, kernel: str | None, **sizes: int) -> Any:
    return dispatch.implementation(
        operation, device=x.device.type, dtype=x.dtype, requested=kernel, **sizes
    )


def _check_dense(name: str, states: torch.Tensor) -> None:
    if not states.is_contiguous():
        raise KernelError(name, f"expected contiguous states, found strides {states.stride()}")


def _check_step(op: str, step: StateStep, beside: torch.Tensor) -> None:
    (R,) = expect_ndim(f"{op} slots", step.slots_R, 1)
    int32 = (torch.int32,)
    check_tensor(f"{op} slots", step.slots_R, (R,), int32, beside)
    check_tensor(f"{op} query_starts", step.query_starts_R1, (R + 1,), int32, beside)
    check_tensor(f"{op} context_lengths", step.context_lengths_R, (R,), int32, beside)
