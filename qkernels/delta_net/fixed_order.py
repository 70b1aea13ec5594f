"""Batch-invariant gated delta net: a row's bits depend only on its request's rows up to it.

Every row is one step of the recurrence, in prompts and verifications, too: the triangular system of
a chunk would round differently from the decode of the same token. On a CPU each row is computed
alone. Legend: see ops.py.
"""

import torch

from qkernels.causal_conv.separate_rows import RecentRows, run_separate_rows_
from qkernels.causal_conv.state import StateStep
from qkernels.delta_net import reference
from qkernels.gpu import device as gpu_device


def delta_rule_(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TA: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_A: torch.Tensor,
    memory_PHKV: torch.Tensor,
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
    write_factor: float = 1.0,
    decay_bound: float = 0.0,
) -> torch.Tensor:
    """Implement ops.delta_rule_."""
    if gpu_device.arch(mixed_TC.device) != "cpu":
        from qkernels.delta_net import triton_recurrence

        return triton_recurrence.delta_rule_(
            *(mixed_TC, b_TH, a_TA, a_log_H, dt_bias_A, memory_PHKV),
            *(step, recent_PNI, write_factor, decay_bound),
        )

    def run(rows, states, row):
        numbers = write_factor, decay_bound
        return reference.delta_rule_(*rows, a_log_H, dt_bias_A, states, row, None, *numbers)

    _, H, _, V = memory_PHKV.shape
    o_THV = mixed_TC.new_zeros(mixed_TC.shape[0], H, V)
    recent = RecentRows(
        recent_PNI=recent_PNI,
        inputs_of=lambda rows: reference.row_inputs(mixed_TC, b_TH, a_TA, rows, H * V),
        rows_of=lambda inputs_nI: reference.rows_of_inputs(inputs_nI, H, H * V, len(dt_bias_A)),
    )
    return run_separate_rows_(run, [mixed_TC, b_TH, a_TA], memory_PHKV, step, o_THV, recent)


def gated_rms_norm(
    x_THV: torch.Tensor,
    z_THV: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Implement ops.gated_rms_norm. Rows of the Triton kernel do not depend on each other."""
    if gpu_device.arch(x_THV.device) != "cpu":
        from qkernels.delta_net import triton_norm

        return triton_norm.gated_rms_norm(x_THV, z_THV, weight_V, eps, sigmoid)
    rows = zip(x_THV.split(1), z_THV.split(1), strict=True)
    return torch.cat([reference.gated_rms_norm(x, z, weight_V, eps, sigmoid) for x, z in rows])
