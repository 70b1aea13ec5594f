"""The operations of Mamba-2: each checks its arguments, then runs a kernel.

Legend: T tokens of a step, C channels of x, B and C, P slots, G groups, H heads, N state size, D
head dim.
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
    """Outputs [T, H, D]: what each token reads from its request's state after its own update.

    `mixed` [T, H D + 2 G N] is x, B and C. A token's step is softplus(dt + dt_bias) within
    `dt_limits`; it keeps exp(-exp(a_log) step) of the state and adds step B x^T. `skip` times x is
    added to the output. `memory`, float32, is the states, changed in place. `recent`: x, B and dt
    of rows that the memory may not include (StateStep); None: it includes all. `kernel` names a row
    of mamba2/rows.py instead of the best one.
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
    """x * silu(z), normalized by the RMS of each group of channels, times the weight.

    `norm_first`: the norm is of x alone, before the product. Without a weight nothing is
    normalized.
    """
    op = "gated_group_norm"
    check_float(f"{op} x", x_TC)
    T, C = expect_ndim(f"{op} x", x_TC, 2)
    check_tensor(f"{op} z", z_TC, (T, C), (x_TC.dtype,), x_TC)
    if weight_C is not None:
        check_tensor(f"{op} weight", weight_C, (C,), (x_TC.dtype,), x_TC)
    if groups < 1 or C % groups:
        raise KernelError(f"{op} x", f"expected {groups} groups of channels, found {C} channels")
    run = dispatch.implementation(
        rows.GATED_GROUP_NORM,
        device=x_TC.device.type,
        dtype=x_TC.dtype,
        requested=kernel,
        in_features=C // groups,
    )
    return run(x_TC, z_TC, weight_C, groups, eps, norm_first)
