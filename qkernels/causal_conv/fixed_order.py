"""Batch-invariant causal convolutions: a row's bits depend only on its own request.

The Triton kernel adds taps in the same order for every tile, so it is used unchanged. On a CPU each
row is computed alone. Legend: see ops.py.
"""

import torch

from qkernels.causal_conv import reference
from qkernels.causal_conv.separate_rows import run_separate_rows_
from qkernels.causal_conv.state import StateStep
from qkernels.gpu import device as gpu_device


def causal_conv_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Implement ops.causal_conv_."""
    if gpu_device.arch(x_TC.device) != "cpu":
        from qkernels.causal_conv import triton_conv

        return triton_conv.causal_conv_(x_TC, weight_CW, bias_C, conv_PCL, step)

    def run(rows, states, row):
        return reference.causal_conv_(*rows, weight_CW, bias_C, states, row)

    return run_separate_rows_(run, [x_TC], conv_PCL, step, torch.zeros_like(x_TC))


def short_conv_(
    mixed_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Implement ops.short_conv_."""
    if gpu_device.arch(mixed_TC.device) != "cpu":
        from qkernels.causal_conv import triton_conv

        return triton_conv.short_conv_(mixed_TC, weight_CW, bias_C, conv_PCL, step)

    def run(rows, states, row):
        return reference.short_conv_(*rows, weight_CW, bias_C, states, row)

    y_TC = mixed_TC.new_zeros(mixed_TC.shape[0], weight_CW.shape[0])
    return run_separate_rows_(run, [mixed_TC], conv_PCL, step, y_TC)
