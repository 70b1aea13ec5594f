"""Sums over the ranks of a group: each checks its arguments, then runs a kernel.

All ranks call the same operations with equal shapes in the same order, on one stream each; results
are bitwise equal on all of them. Nothing waits for the device, so all may be captured in a CUDA
graph. Legend: M rows, C channels.
"""

import torch

from qkernels.checks import check_float, check_norm, check_tensor, expect_ndim
from qkernels.collective.channels import Peers
from qkernels.collective.config import Way, way
from qkernels.errors import KernelError
from qkernels.linear.plan import InputForm, LinearInput
from qkernels.operands.codes import InputRounding
from qkernels.operands.split_k import LinearOutput, SplitKPartials
from qkernels.rowwise.branch import PLAIN, Branch
from qkernels.rowwise.into_form import add_rms_norm_into


def way_to_reduce(x: LinearOutput, peers: Peers) -> Way | None:
    """How all_reduce would sum x over the ranks; None: it is too large for the peers' buffers."""
    return way(_message_bytes(x), peers.layout.limits)


def _message_bytes(x: LinearOutput) -> int:
    item = torch.float32.itemsize if isinstance(x, SplitKPartials) else x.dtype.itemsize
    return x.shape.numel() * item


def all_reduce(x: LinearOutput, peers: Peers, how: Way | None = None) -> torch.Tensor:
    """The sum of x over all ranks, float32 inside and in the order of ranks, in x's dtype: new.

    `how`: not as its size says.
    """
    check_float("all_reduce x", x, parts=True)
    limits = peers.layout.limits
    how = how or way_to_reduce(x, peers)
    most = limits.one_shot if how == "one_shot" else limits.two_shot
    if how is None or _message_bytes(x) > most:
        found = f"{_message_bytes(x)} of {list(x.shape)}"
        raise KernelError("all_reduce x", f"expected at most {most} bytes, found {found}")
    if isinstance(x, SplitKPartials):
        first, *others = x.parts.unbind(0)
        return _all_reduce(sum(others, first), peers, how).to(x.dtype)
    return _all_reduce(x, peers, how)


def _all_reduce(x: torch.Tensor, peers: Peers, how: Way) -> torch.Tensor:
    from qkernels.collective import one_shot, two_shot  # imports triton

    return (one_shot if how == "one_shot" else two_shot).all_reduce(x, peers)


def all_reduce_add_rms_norm_into(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    form: InputForm,
    peers: Peers,
    branch: Branch = PLAIN,
) -> tuple[LinearInput, torch.Tensor]:
    """add_rms_norm_into of the sum of x over all ranks. The residual is the same on each of them.

    One kernel for rows that fit (`fuses`), else all_reduce and a norm.
    """
    op = "all_reduce_add_rms_norm_into"
    check_float(f"{op} x", x_MC, parts=True)
    expect_ndim(f"{op} x", x_MC, 2)
    check_tensor(f"{op} residual", residual_MC, x_MC.shape, (x_MC.dtype,), x_MC)
    check_norm(f"{op} weight", weight_C, x_MC)
    check_norm(f"{op} branch", branch.norm_C, x_MC)
    if not fuses(x_MC, form, peers):
        return add_rms_norm_into(
            all_reduce(x_MC, peers), residual_MC, weight_C, eps, form, branch=branch
        )
    from qkernels.collective import one_shot_norm  # imports triton

    return one_shot_norm.all_reduce_add_rms_norm_into(
        x_MC, residual_MC, weight_C, eps, form, peers, branch
    )


def fuses(x_MC: LinearOutput, form: InputForm, peers: Peers) -> bool:
    """Whether one kernel sums x over the ranks and norms it."""
    if isinstance(form, InputRounding) and form.activation.per not in ("token", "tensor"):
        return False
    return peers.rows(x_MC) is not None
