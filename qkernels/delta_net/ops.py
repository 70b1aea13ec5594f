"""Gated delta net operations: each checks its arguments, then runs a kernel.

T  tokens of a step                        H  value heads
R  requests                                J  key heads
C  channels of queries, keys and values    K  key dim
P  state slots                             V  value dim
N  newest rows that a slot keeps           A  decays of a token
I  inputs of a row
"""

from typing import Any

import torch

from qkernels import dispatch
from qkernels.causal_conv.ops import check_dense, check_recent, check_step
from qkernels.causal_conv.state import StateStep
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.delta_net import rows
from qkernels.delta_net.reference import recent_width
from qkernels.errors import KernelError

MAX_DECAY = 50  # the log of a decay is at least -50 in the kernels, too (triton_gates.py)


def delta_rule_(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TA: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_A: torch.Tensor,
    memory_PHKV: torch.Tensor,
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
    kernel: str | None = None,
    *,
    write_factor: float = 1.0,
    decay_bound: float = 0.0,
) -> torch.Tensor:
    """Update the states by the gated delta rule, and return outputs [T, H, V].

    A token first updates its request's state, then its output reads the state. `mixed_TC` [T, 2 J K
    + H V] is queries, keys and values, concatenated; this operation normalizes queries and keys to
    length 1. `write_factor` sigmoid(b) scales a token's update; OLMo-Hybrid has a factor of 2, with
    which an update may reverse what the state returns for the token's key. The state decays by
    exp(-exp(a_log) softplus(a + dt_bias)): one factor per head (A = H), or one per key channel
    (A = H K, Kimi Delta Attention). `decay_bound` below 0 needs a factor per key channel: the state
    decays by exp(decay_bound sigmoid(exp(a_log) (a + dt_bias))). Ling 3 has a bound of -5.

    `memory_PHKV`, float32, holds the states and is changed in place. `recent_PNI` holds keys,
    values, b and a of rows that a state may not include yet (StateStep); None: states include all
    rows.
    """
    op = "delta_rule_"
    check_float(f"{op} mixed", mixed_TC)
    T, C = expect_ndim(f"{op} mixed", mixed_TC, 2)
    check_tensor(f"{op} memory", memory_PHKV, (None,) * 4, (torch.float32,), mixed_TC)
    check_dense(f"{op} memory", memory_PHKV)
    _, H, K, V = memory_PHKV.shape
    heads, rest = divmod(C - H * V, 2 * K)
    if rest or heads < 1 or H % heads:
        raise KernelError(
            f"{op} mixed",
            f"expected queries and keys of {K} channels for heads that divide {H}, and {H} x {V}"
            f" values, found {C} channels",
            "pass heads as the rows of the mixer's projection have them",
        )
    (A,) = expect_ndim(f"{op} dt_bias", dt_bias_A, 1)
    if A not in (H, H * K):
        raise KernelError(
            f"{op} dt_bias",
            f"expected {H} or {H * K} numbers, found {A}",
            "pass one number per head or key channel",
        )
    for name, x, size in (("b", b_TH, H), ("a", a_TA, A)):
        check_tensor(f"{op} {name}", x, (T, size), (mixed_TC.dtype,), mixed_TC)
    for name, x, size in (("a_log", a_log_H, H), ("dt_bias", dt_bias_A, A)):
        check_tensor(f"{op} {name}", x, (size,), (torch.float32,), mixed_TC)
    if not 0 < write_factor <= 2:
        raise KernelError(
            f"{op} write_factor",
            f"expected above 0, at most 2, found {write_factor}",
            "pass 1 or 2",
        )
    if not -MAX_DECAY <= decay_bound <= 0 or (decay_bound and A == H):
        raise KernelError(
            f"{op} decay_bound",
            f"expected 0, or at least -{MAX_DECAY} with decays of {H * K} key channels, found"
            f" {decay_bound} with {A} decays",
            "pass 0 for no bound",
        )
    check_step(op, step, mixed_TC)
    inputs = recent_width(heads * K, H * V, H, A)
    check_recent(op, recent_PNI, inputs, step, mixed_TC)
    run = _run(rows.DELTA_RULE, mixed_TC, kernel, in_features=K, head_dim=V)
    rule = mixed_TC, b_TH, a_TA, a_log_H, dt_bias_A, memory_PHKV
    return run(*rule, step, recent_PNI, write_factor, decay_bound)


def gated_rms_norm(
    x_THV: torch.Tensor,
    z_THV: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    kernel: str | None = None,
    *,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Return x / rms(x) * weight * silu(z) for each head of x [T, H, V].

    With `sigmoid`, the last factor is sigmoid(z).
    """
    op = "gated_rms_norm"
    check_float(f"{op} x", x_THV)
    shape = expect_ndim(f"{op} x", x_THV, 3)
    check_tensor(f"{op} z", z_THV, shape, (x_THV.dtype,), x_THV)
    check_tensor(f"{op} weight", weight_V, (shape[2],), (x_THV.dtype,), x_THV)
    run = _run(rows.GATED_RMS_NORM, x_THV, kernel, head_dim=shape[2])
    return run(x_THV, z_THV, weight_V, eps, sigmoid)


def _run(operation: dispatch.Operation, x: torch.Tensor, kernel: str | None, **sizes: int) -> Any:
    return dispatch.implementation(
        operation, device=x.device.type, dtype=x.dtype, requested=kernel, **sizes
    )
