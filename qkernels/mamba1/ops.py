"""The scan of Mamba-1: checks its arguments, then runs a kernel.

T  tokens of a step    I  channels
P  state slots         N  state size per channel
"""

import torch

from qkernels import dispatch
from qkernels.causal_conv.ops import check_dense, check_recent, check_step
from qkernels.causal_conv.state import StateStep
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.mamba1 import rows
from qkernels.mamba1.reference import recent_width


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
    kernel: str | None = None,
) -> torch.Tensor:
    """Update the states by a selective scan, and return outputs [T, I].

    A token first updates its request's state, then its output reads the state. A token's step size
    in a channel is softplus(dt). Each number of the state decays by exp(rate step), and step B x is
    added to it. `skip_I` times x is added to the output. `rates_NI`, float32, are negative.

    `memory_P1NI`, float32, holds the states and is changed in place. `recent_PNI` holds x, dt and B
    of rows that a state may not include yet (StateStep); None: states include all rows. `kernel`
    requests a row of mamba1/rows.py.
    """
    op = "channel_scan_"
    check_float(f"{op} x", x_TI)
    T, channels = expect_ndim(f"{op} x", x_TI, 2)
    check_tensor(f"{op} dt", dt_TI, (T, channels), (x_TI.dtype,), x_TI)
    check_tensor(f"{op} rates", rates_NI, (None, channels), (torch.float32,), x_TI)
    check_dense(f"{op} rates", rates_NI)
    N = rates_NI.shape[0]
    for name, x in (("b", b_TN), ("c", c_TN)):
        check_tensor(f"{op} {name}", x, (T, N), (x_TI.dtype,), x_TI)
    check_tensor(f"{op} skip", skip_I, (channels,), (torch.float32,), x_TI)
    check_tensor(f"{op} memory", memory_P1NI, (None, 1, N, channels), (torch.float32,), x_TI)
    check_dense(f"{op} memory", memory_P1NI)
    check_step(op, step, x_TI)
    check_recent(op, recent_PNI, recent_width(channels, N), step, x_TI)
    run = dispatch.implementation(
        rows.CHANNEL_SCAN,
        device=x_TI.device.type,
        dtype=x_TI.dtype,
        requested=kernel,
        in_features=N,
    )
    return run(x_TI, dt_TI, b_TN, c_TN, rates_NI, skip_I, memory_P1NI, step, recent_PNI)
