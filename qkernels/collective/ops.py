"""Sums over the ranks of a group. Each operation checks its arguments, then runs a kernel.

All ranks call the same operations with equal shapes in the same order, on one stream each; results
are bitwise equal on all ranks. If shards are unequal (PeerLayout), some ranks may give split-K
partial sums and others tensors. Nothing waits for the device, so all operations can be captured in
a CUDA graph. Legend: M rows, C channels.
"""

import torch

from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.collective.channels import Peers
from qkernels.collective.config import Algorithm, algorithm_for
from qkernels.errors import KernelError
from qkernels.operands.codes import InputRounding
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput, SplitKPartials, reduced
from qkernels.rowwise.ops import check_norm_spec, norm
from qkernels.rowwise.spec import PLAIN, Branch, NormSpec


def all_reduce_algorithm(x: LinearOutput, peers: Peers) -> Algorithm | None:
    """Return the algorithm of all_reduce for x; None: x is too large for the peers' buffers."""
    return algorithm_for(_message_bytes(x, peers), peers.layout.limits)


def _message_bytes(x: LinearOutput, peers: Peers) -> int:
    is_float32 = isinstance(x, SplitKPartials) and peers.layout.equal_shards
    return x.shape.numel() * (torch.float32 if is_float32 else x.dtype).itemsize


def all_reduce(x: LinearOutput, peers: Peers, how: Algorithm | None = None) -> torch.Tensor:
    """Return a new tensor: the sum of x over all ranks, added in float32 in rank order.

    `how` overrides the choice by size.
    """
    check_float("all_reduce x", x, parts=True)
    limits = peers.layout.limits
    if not peers.layout.equal_shards:
        x = reduced(x)
    how = how or all_reduce_algorithm(x, peers)
    most = limits.one_shot if how == "one_shot" else limits.two_shot
    if how is None or _message_bytes(x, peers) > most:
        found = f"{_message_bytes(x, peers)} of {list(x.shape)}"
        raise KernelError(
            "all_reduce x",
            f"expected at most {most} bytes, found {found}",
            "use NCCL for larger tensors",
        )
    if isinstance(x, SplitKPartials):
        first, *others = x.parts.unbind(0)
        return _all_reduce(sum(others, first), peers, how).to(x.dtype)
    return _all_reduce(x, peers, how)


def _all_reduce(x: torch.Tensor, peers: Peers, how: Algorithm) -> torch.Tensor:
    from qkernels.collective import one_shot, two_shot  # imports triton

    return (one_shot if how == "one_shot" else two_shot).all_reduce(x, peers)


def all_reduce_norm(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    spec: NormSpec | None,
    peers: Peers,
    out: InputForm = None,
    branch: Branch = PLAIN,
) -> tuple[LinearInput, torch.Tensor]:
    """Compute ops.norm of the sum of x over all ranks. The residual must be equal on all ranks.

    It is one kernel if rows fit (`fuses`), else all_reduce and a norm.
    """
    op = "all_reduce_norm"
    check_float(f"{op} x", x_MC, parts=True)
    expect_ndim(f"{op} x", x_MC, 2)
    check_tensor(f"{op} residual", residual_MC, x_MC.shape, (x_MC.dtype,), x_MC)
    if spec is not None:
        check_norm_spec(op, spec, x_MC)
    if branch.norm is not None:
        check_norm_spec(f"{op} branch", branch.norm, x_MC)
    if not fuses(x_MC, out, peers):
        return norm(all_reduce(x_MC, peers), residual_MC, spec, out, branch)
    from qkernels.collective import one_shot_norm  # imports triton

    return one_shot_norm.all_reduce_norm(x_MC, residual_MC, spec, peers, out, branch)


def fuses(x_MC: LinearOutput, out: InputForm, peers: Peers) -> bool:
    """Return True if one kernel sums x over the ranks and normalizes it."""
    if isinstance(out, InputRounding) and out.activation.per not in ("token", "tensor"):
        return False
    return peers.rows(x_MC) is not None
