"""Mamba-2 operations: each checks its arguments, then runs a kernel.

T  tokens of a step            H  heads
C  channels of x, B and C      G  groups
P  state slots                 N  state size
                               D  head dim
"""

import torch

from qkernels import dispatch
from qkernels.causal_conv.ops import check_dense, check_recent, check_step
from qkernels.causal_conv.state import StateStep
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.mamba2 import rows
from qkernels.mamba2.reference import recent_width


def selective_scan_(
    mixed_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    skip_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHND: torch.Tensor,
    dt_limits: tuple[float, float],
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Update the states by a selective scan, and return outputs [T, H, D].

    A token first updates its request's state, then its output reads the state. `mixed_TC` [T, H D +
    2 G N] is x, B and C, concatenated. A token's step size is softplus(dt + dt_bias), clamped to
    `dt_limits`. The state decays by exp(-exp(a_log) step), and step B x^T is added to it. `skip_H`
    times x is added to the output.

    `memory_PHND`, float32, holds the states and is changed in place. `recent_PNI` holds x, B and dt
    of rows that a state may not include yet (StateStep); None: states include all rows. `kernel`
    requests a row of mamba2/rows.py.
    """
    op = "selective_scan_"
    check_float(f"{op} mixed", mixed_TC)
    T, C = expect_ndim(f"{op} mixed", mixed_TC, 2)
    check_tensor(f"{op} memory", memory_PHND, (None,) * 4, (torch.float32,), mixed_TC)
    check_dense(f"{op} memory", memory_PHND)
    _, H, N, D = memory_PHND.shape
    groups, rest = divmod(C - H * D, 2 * N)
    if rest or groups < 1 or H % groups:
        raise KernelError(
            f"{op} mixed",
            f"expected {H} x {D} channels of x, and B and C of {N} channels for groups that divide"
            f" {H}, found {C} channels",
            "pass the output of the mixer's projection",
        )
    check_tensor(f"{op} dt", dt_TH, (T, H), (mixed_TC.dtype,), mixed_TC)
    for name, x in (("a_log", a_log_H), ("skip", skip_H), ("dt_bias", dt_bias_H)):
        check_tensor(f"{op} {name}", x, (H,), (torch.float32,), mixed_TC)
    check_step(op, step, mixed_TC)
    check_recent(op, recent_PNI, recent_width(H * D, groups * N, H), step, mixed_TC)
    run = dispatch.implementation(
        rows.SELECTIVE_SCAN,
        device=mixed_TC.device.type,
        dtype=mixed_TC.dtype,
        requested=kernel,
        in_features=N,
        head_dim=D,
    )
    return run(
        mixed_TC, dt_TH, a_log_H, skip_H, dt_bias_H, memory_PHND, dt_limits, step, recent_PNI
    )


def gated_group_norm(
    x_TC: torch.Tensor,
    z_TC: torch.Tensor,
    weight_C: torch.Tensor | None,
    groups: int,
    eps: float,
    norm_first: bool,
    kernel: str | None = None,
) -> torch.Tensor:
    """Return x * silu(z), normalized by the RMS of each group of channels, times the weight.

    With `norm_first`, x alone is normalized, before the product. Without a weight nothing is
    normalized.
    """
    op = "gated_group_norm"
    check_float(f"{op} x", x_TC)
    T, C = expect_ndim(f"{op} x", x_TC, 2)
    check_tensor(f"{op} z", z_TC, (T, C), (x_TC.dtype,), x_TC)
    if weight_C is not None:
        check_tensor(f"{op} weight", weight_C, (C,), (x_TC.dtype,), x_TC)
    if groups < 1 or C % groups:
        raise KernelError(
            f"{op} x",
            f"expected {groups} groups of channels, found {C} channels",
            "pass a multiple of the groups",
        )
    run = dispatch.implementation(
        rows.GATED_GROUP_NORM,
        device=x_TC.device.type,
        dtype=x_TC.dtype,
        requested=kernel,
        in_features=C // groups,
    )
    return run(x_TC, z_TC, weight_C, groups, eps, norm_first)
