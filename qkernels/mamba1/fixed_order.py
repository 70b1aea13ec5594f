"""Batch-invariant Mamba-1: a row's bits depend only on its request's rows up to it.

The Triton kernel always computes one row after the other. On a CPU each row is computed alone.
Legend: see ops.py.
"""

import torch

from qkernels.causal_conv.separate_rows import RecentRows, run_separate_rows_
from qkernels.causal_conv.state import StateStep
from qkernels.gpu import device as gpu_device
from qkernels.mamba1 import reference


def channel_scan_(
    x_TI: torch.Tensor,
    dt_TI: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    rates_NI: torch.Tensor,
    skip_I: torch.Tensor,
    memory_P1NI: torch.Tensor,
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement ops.channel_scan_."""
    of_rows, of_channels = [x_TI, dt_TI, b_TN, c_TN], (rates_NI, skip_I)
    if gpu_device.arch(x_TI.device) != "cpu":
        from qkernels.mamba1 import triton_scan

        return triton_scan.channel_scan_(*of_rows, *of_channels, memory_P1NI, step, recent_PNI)

    def run(rows, states, row):
        return reference.channel_scan_(*rows, *of_channels, states, row)

    def rows_of(inputs_nI):
        x, dt, b = reference.rows_of_inputs(inputs_nI, x_TI.shape[1])
        return x, dt, b, b  # no output of these rows is read, so C may be anything

    recent = RecentRows(
        recent_PNI=recent_PNI,
        inputs_of=lambda rows: (x_TI[rows], dt_TI[rows], b_TN[rows]),
        rows_of=rows_of,
    )
    return run_separate_rows_(run, of_rows, memory_P1NI, step, torch.zeros_like(x_TI), recent)
