"""Norms, activations and conversions: each operation checks its arguments, then runs a kernel.

A form (operands/forms.py) is the input format that the plan of the next linear requires. Legend:
see qkernels/ops.py.
"""

import math

import torch

from formats.scheme import ActivationSpec
from qkernels import dispatch
from qkernels.checks import check_float, check_limb_rows, check_norm, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import LinearOutput
from qkernels.rowwise import rows
from qkernels.rowwise.spec import PLAIN, ActSpec, Branch, NormSpec


def norm(
    x: LinearOutput,
    residual: torch.Tensor | None,
    spec: NormSpec | None,
    out: InputForm = None,
    branch: Branch = PLAIN,
    kernel: str | None = None,
    addend: torch.Tensor | None = None,
) -> tuple[LinearInput, torch.Tensor]:
    """Normalize x + residual over the last dim. Returns (the norm in the form `out`, the sum).

    `branch` is applied to x before the residual is added. x [..., C] may be split-K partial sums if
    there is a residual; without one, the sum is x itself. If `spec` is None, nothing is normalized
    and the first result is the sum. Codes and limbs need x [M, C]. `kernel` requests a row of
    rowwise/rows.py. `addend`, another rank's x, is added to x first, and this sum is rounded; it
    needs a residual. Raises KernelError if arguments do not fit.
    """
    check_float("norm x", x, parts=residual is not None)
    if addend is not None:
        if residual is None:
            raise KernelError("norm addend", "expected a residual", "add the addend to x")
        check_tensor("norm addend", addend, x.shape, (x.dtype,), x)
    if residual is not None:
        check_tensor("norm residual", residual, x.shape, (x.dtype,), x)
        if branch.norm is not None:
            check_norm_spec("norm branch", branch.norm, x)
    if spec is not None:
        check_norm_spec("norm", spec, x)
    check_form("norm", x, x.shape[-1], out)
    run = _run(rows.NORM, x, x.shape[-1], out, kernel)
    if addend is None:
        return run(x, residual, spec, out, branch)
    return run(x, residual, spec, out, branch, addend)


def activate(
    x: torch.Tensor, spec: ActSpec, out: InputForm = None, kernel: str | None = None
) -> LinearInput:
    """Return activation(x) of x [..., I], or activation(gate) * up of x [..., 2 I], gate first.

    The result [..., I] has the form `out`; codes and limbs need x [M, I] or [M, 2 I]. Raises
    KernelError if arguments do not fit.
    """
    check_float("activate x", x)
    width = x.shape[-1]
    if spec.gated:
        if width % 2:
            raise KernelError(
                "activate x",
                f"expected an even last dim, found {list(x.shape)}",
                "pass gate and up side by side",
            )
        width //= 2
    elif spec.kind == "swiglu_oai":
        raise KernelError(
            "activate gated", "expected True for swiglu_oai, found False", "pass gated=True"
        )
    if spec.limit is not None and not 0 < spec.limit < math.inf:
        raise KernelError(
            "activate limit",
            f"expected a number above 0, found {spec.limit}",
            "pass None for no limit",
        )
    check_form("activate", x, width, out)
    return _run(rows.ACTIVATE, x, width, out, kernel)(x, spec, out)


def in_form(x_MK: torch.Tensor, form: InputForm) -> LinearInput:
    """Convert a tensor to a form: unchanged, by `quantize_input`, or by `to_limbs`."""
    if isinstance(form, InputRounding):
        return Codes(*quantize_input(x_MK, *form))
    return to_limbs(x_MK, form) if isinstance(form, LimbForm) else x_MK


def quantize_input(
    x_MK: torch.Tensor,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [M, K] as `linear` rounds its input. Returns (codes [M, K], float32 scales [M, S]).

    Codes are int8 or float8_e4m3fn. `scale`, float32 [], is the scale of a static activation, else
    None. `kernel` requests a row of rowwise/rows.py.
    """
    form = InputRounding(activation, scale)
    check_float("quantize_input x", x_MK)
    check_form("quantize_input", x_MK, x_MK.shape[-1], form)
    run = _run(rows.QUANTIZE_INPUT, x_MK, x_MK.shape[1], form, kernel)
    return run(x_MK, activation, scale)


def to_limbs(x_MK: torch.Tensor, form: LimbForm, kernel: str | None = None) -> Limbs:
    """Convert a linear's float16 or bfloat16 input to 8-bit limbs (operands/limbs.py).

    `kernel` requests a row of rowwise/rows.py.
    """
    check_float("to_limbs x", x_MK)
    check_form("to_limbs", x_MK, x_MK.shape[-1], form)
    return _run(rows.TO_LIMBS, x_MK, x_MK.shape[-1], form, kernel)(x_MK, form)


def embed_norms(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
    out: InputForm = None,
    kernel: str | None = None,
) -> tuple[LinearInput, torch.Tensor]:
    """RMS-normalize the tokens' rows of a table [V, C] and states [M, C], and concatenate both.

    Returns ([M, 2 C] in the form `out`, the normalized states [M, C]). `tokens_M` is int64.
    """
    op = "embed_norms"
    check_float(f"{op} states", state_MC)
    M, C = expect_ndim(f"{op} states", state_MC, 2)
    check_tensor(f"{op} tokens", tokens_M, (M,), (torch.int64,), state_MC)
    check_tensor(f"{op} table", table_VC, (None, C), (state_MC.dtype,), state_MC)
    if not table_VC.is_contiguous():
        raise KernelError(f"{op} table", "expected a contiguous table", "make it contiguous")
    check_norm(f"{op} norm of states", state_norm_C, state_MC)
    check_tensor(f"{op} norm of the table", table_norm_C, (C,), (state_norm_C.dtype,), state_MC)
    inputs = tokens_M, table_VC, table_norm_C, state_MC, state_norm_C, eps
    if isinstance(out, InputRounding):  # no kernel rounds both halves with one scale
        both_M2C, normed_MC = _run(rows.EMBED_NORMS, state_MC, C, None, kernel)(*inputs)
        return in_form(both_M2C, out), normed_MC
    if out is not None:
        check_limb_rows(f"{op} states", state_MC, C, out)
    return _run(rows.EMBED_NORMS, state_MC, C, out, kernel)(*inputs, out)


def _run(
    operation: dispatch.Operation,
    x: LinearOutput,
    width: int,
    out: InputForm,
    kernel: str | None,
):
    device, dtype = x.device.type, x.dtype
    if out is None:
        return dispatch.implementation(operation, device=device, dtype=dtype, requested=kernel)
    return dispatch.implementation(
        operation,
        device=device,
        dtype=dtype,
        requested=kernel,
        form="limbs" if isinstance(out, LimbForm) else "codes",
        activation=out.activation if isinstance(out, InputRounding) else None,
        in_features=width,
    )


def check_norm_spec(name: str, spec: NormSpec, x: LinearOutput) -> None:
    """Raise KernelError unless the norm's tensors fit x's channels. An RMS norm has no bias."""
    check_norm(f"{name} weight", spec.weight_C, x)
    check_norm(f"{name} bias", spec.bias_C, x)
    if spec.bias_C is not None and spec.kind == "rms":
        raise KernelError(f"{name} bias", "expected none for an RMS norm", 'use kind="layer"')


def check_form(op: str, x: LinearOutput, width: int, out: InputForm) -> None:
    """Raise KernelError unless results of `width` columns per row of x can have the form `out`."""
    if out is None:
        return
    expect_ndim(f"{op} x", x, 2)
    if isinstance(out, LimbForm):
        check_limb_rows(f"{op} x", x, width, out, parts=True)
        return
    activation, scale = out
    if (scale is None) != activation.dynamic:
        expected = "None" if activation.dynamic else "one number"
        raise KernelError(
            f"{op} scale",
            f"expected {expected} for {activation}",
            "pass the scale that the activation needs",
        )
    if scale is not None:
        check_tensor(f"{op} scale", scale, (), (torch.float32,), x)
