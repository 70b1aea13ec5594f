"""Batch-invariant Mamba-2: a row's bits depend only on its request's rows up to it.

Every row is one step of the recurrence, in prompts and verifications, too. On a CPU each row is
computed alone. Legend: see ops.py.
"""

import torch

from qkernels.causal_conv.separate_rows import RecentRows, run_separate_rows_
from qkernels.causal_conv.state import StateStep
from qkernels.gpu import device as gpu_device
from qkernels.mamba2 import reference


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
) -> torch.Tensor:
    """Implement ops.selective_scan_."""
    of_heads = a_log_H, skip_H, dt_bias_H
    if gpu_device.arch(mixed_TC.device) != "cpu":
        from qkernels.mamba2 import triton_recurrence

        return triton_recurrence.selective_scan_(
            mixed_TC, dt_TH, *of_heads, memory_PHND, dt_limits, step, recent_PNI
        )

    def run(rows, states, row):
        return reference.selective_scan_(*rows, *of_heads, states, dt_limits, row)

    _, H, _, D = memory_PHND.shape
    y_THD = mixed_TC.new_zeros(mixed_TC.shape[0], H, D)
    recent = RecentRows(
        recent_PNI=recent_PNI,
        inputs_of=lambda rows: reference.row_inputs(mixed_TC, dt_TH, rows, H * D),
        rows_of=lambda inputs_nI: reference.rows_of_inputs(inputs_nI, H, H * D),
    )
    return run_separate_rows_(run, [mixed_TC, dt_TH], memory_PHND, step, y_THD, recent)


def gated_group_norm(
    x_TC: torch.Tensor,
    z_TC: torch.Tensor,
    weight_C: torch.Tensor | None,
    groups: int,
    eps: float,
    norm_first: bool,
) -> torch.Tensor:
    """Implement ops.gated_group_norm. Rows of the Triton kernel do not depend on each other."""
    settings = weight_C, groups, eps, norm_first
    if gpu_device.arch(x_TC.device) != "cpu":
        from qkernels.mamba2 import triton_norm

        return triton_norm.gated_group_norm(x_TC, z_TC, *settings)
    rows = zip(x_TC.split(1), z_TC.split(1), strict=True)
    return torch.cat([reference.gated_group_norm(x, z, *settings) for x, z in rows])
