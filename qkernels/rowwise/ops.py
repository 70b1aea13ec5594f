"""Norms, activations and rounding: each checks its arguments, then runs a kernel.

Legend as in ops.py.
"""

import torch

from formats.scheme import ActivationSpec
from qkernels import dispatch
from qkernels.checks import check_float, check_limb_rows, check_norm, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import LinearOutput
from qkernels.rowwise.branch import PLAIN, Branch


def quantize_input(
    x_MK: torch.Tensor,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [M, K] to (codes [M, K], scales [M, S] float32), as `linear` rounds its input.

    Codes are int8 or float8_e4m3fn. `scale` [] float32 is that of a static activation, else None.
    `kernel` names a row of qkernels.dispatch instead of the best one.
    """
    check_quantized("quantize_input", x_MK, activation, scale)
    return _run_quantized("quantize_input", x_MK, x_MK.shape[1], activation, kernel)(
        x_MK, activation, scale
    )


def quantize_input_asymmetric(
    x_MK: torch.Tensor, kernel: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round x [M, K] to int8 codes that span each row's values, from the least to the largest.

    Returns (codes [M, K], scales [M, 1] float32, zeros [M, 1] int32): x is about scale * (code -
    zero), and 0 is exact. For `linear_codes`.
    """
    check_float("quantize_input_asymmetric x", x_MK)
    expect_ndim("quantize_input_asymmetric x", x_MK, 2)
    run = dispatch.implementation(
        "quantize_input_asymmetric",
        device=x_MK.device.type,
        dtype=x_MK.dtype,
        requested=kernel,
        in_features=x_MK.shape[1],
    )
    return run(x_MK)


def rms_norm_quantize(
    x_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input(rms_norm(x)) of x [M, C], in one pass."""
    op = "rms_norm_quantize"
    check_quantized(op, x_MC, activation, scale)
    check_norm(f"{op} weight", weight_C, x_MC)
    run = _run_quantized(op, x_MC, x_MC.shape[1], activation, kernel)
    return run(x_MC, weight_C, eps, activation, scale)


def add_rms_norm_quantize(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
    branch: Branch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (*quantize_input(y), sum) of add_rms_norm's (y, sum), all new."""
    op = "add_rms_norm_quantize"
    check_quantized(op, x_MC, activation, scale, parts=True)
    check_tensor(f"{op} residual", residual_MC, x_MC.shape, (x_MC.dtype,), x_MC)
    check_norm(f"{op} weight", weight_C, x_MC)
    check_norm(f"{op} branch", branch.norm_C, x_MC)
    run = _run_quantized(op, x_MC, x_MC.shape[1], activation, kernel)
    return run(x_MC, residual_MC, weight_C, eps, activation, scale, branch)


def silu_and_mul_quantize(
    x_M2I: torch.Tensor,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input(silu_and_mul(x)) of x [M, 2 I], gate beside up, in one pass."""
    return _act_and_mul_quantize("silu_and_mul_quantize", x_M2I, activation, scale, kernel)


def gelu_and_mul_quantize(
    x_M2I: torch.Tensor,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input(gelu_and_mul(x)) of x [M, 2 I], gate beside up, in one pass."""
    return _act_and_mul_quantize("gelu_and_mul_quantize", x_M2I, activation, scale, kernel)


def _act_and_mul_quantize(
    op: str,
    x_M2I: torch.Tensor,
    activation: ActivationSpec,
    scale: torch.Tensor | None,
    kernel: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_quantized(op, x_M2I, activation, scale)
    _check_halves(op, x_M2I)
    run = _run_quantized(op, x_M2I, x_M2I.shape[1] // 2, activation, kernel)
    return run(x_M2I, activation, scale)


def rms_norm(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of x [..., C] over its last dim, times weight [C]; float32 inside.

    With a weight in x's dtype, x over its root mean square is rounded before it is multiplied, as
    in Llama. With a float32 weight the product alone is rounded, as in Gemma.
    """
    check_float("rms_norm x", x)
    check_norm("rms_norm weight", weight_C, x)
    return _run("rms_norm", x)(x, weight_C, eps)


def add_rms_norm(
    x: LinearOutput,
    residual: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    branch: Branch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(b + residual), b + residual), both new; b is x after the branch's changes.

    Without a weight nothing is normed: the first result is the second.
    """
    check_float("add_rms_norm x", x, parts=True)
    check_tensor("add_rms_norm residual", residual, x.shape, (x.dtype,), x)
    check_norm("add_rms_norm weight", weight_C, x)
    check_norm("add_rms_norm branch", branch.norm_C, x)
    return _run("add_rms_norm", x)(x, residual, weight_C, eps, branch)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x [..., 2 I], gate beside up: [..., I]."""
    check_float("silu_and_mul x", x)
    _check_halves("silu_and_mul", x)
    return _run("silu_and_mul", x)(x)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with the tanh approximation, for x [..., 2 I], gate beside up: [..., I]."""
    check_float("gelu_and_mul x", x)
    _check_halves("gelu_and_mul", x)
    return _run("gelu_and_mul", x)(x)


def _check_halves(op: str, x: torch.Tensor) -> None:
    if x.shape[-1] % 2:
        raise KernelError(f"{op} x", f"expected an even last dim, found {list(x.shape)}")


def _run(op: str, x: LinearOutput):
    return dispatch.implementation(op, device=x.device.type, dtype=x.dtype)


def _run_quantized(
    op: str, x: LinearOutput, inputs: int, activation: ActivationSpec, kernel: str | None
):
    return dispatch.implementation(
        op,
        device=x.device.type,
        dtype=x.dtype,
        requested=kernel,
        activation=activation,
        in_features=inputs,
    )


def to_limbs(x_MK: torch.Tensor, form: LimbForm, kernel: str | None = None) -> Limbs:
    """The inputs of a linear, float16 or bfloat16, as 8-bit limbs (operands/limbs.py).

    `kernel` names a row of qkernels.dispatch instead of the best one.
    """
    check_limbs("to_limbs", x_MK, form)
    return _run_limbs("to_limbs", x_MK, kernel)(x_MK, form)


def rms_norm_limbs(
    x_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    form: LimbForm,
    kernel: str | None = None,
) -> Limbs:
    """to_limbs(rms_norm(x)) of x [M, C], in one pass."""
    op = "rms_norm_limbs"
    check_limbs(op, x_MC, form)
    check_norm(f"{op} weight", weight_C, x_MC)
    return _run_limbs(op, x_MC, kernel)(x_MC, weight_C, eps, form)


def add_rms_norm_limbs(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    form: LimbForm,
    kernel: str | None = None,
    branch: Branch = PLAIN,
) -> tuple[Limbs, torch.Tensor]:
    """Returns (to_limbs(y), sum) of add_rms_norm's (y, sum)."""
    op = "add_rms_norm_limbs"
    check_limbs(op, x_MC, form, parts=True)
    check_tensor(f"{op} residual", residual_MC, x_MC.shape, (x_MC.dtype,), x_MC)
    check_norm(f"{op} weight", weight_C, x_MC)
    check_norm(f"{op} branch", branch.norm_C, x_MC)
    return _run_limbs(op, x_MC, kernel)(x_MC, residual_MC, weight_C, eps, form, branch)


def silu_and_mul_limbs(x_M2I: torch.Tensor, form: LimbForm, kernel: str | None = None) -> Limbs:
    """to_limbs(silu_and_mul(x)) of x [M, 2 I], gate beside up, in one pass."""
    check_limbs("silu_and_mul_limbs", x_M2I, form, halves=2)
    return _run_limbs("silu_and_mul_limbs", x_M2I, kernel)(x_M2I, form)


def gelu_and_mul_limbs(x_M2I: torch.Tensor, form: LimbForm, kernel: str | None = None) -> Limbs:
    """to_limbs(gelu_and_mul(x)) of x [M, 2 I], gate beside up, in one pass."""
    check_limbs("gelu_and_mul_limbs", x_M2I, form, halves=2)
    return _run_limbs("gelu_and_mul_limbs", x_M2I, kernel)(x_M2I, form)


def embed_norms(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm of the tokens' rows of a table [V, C] beside that of states [M, C], in one pass.

    Returns (both [M, 2 C], the normed states [M, C]); `tokens` [M] int64.
    """
    op = "embed_norms"
    _check_embed_norms(op, tokens_M, table_VC, table_norm_C, state_MC, state_norm_C)
    run = dispatch.implementation(
        op, device=state_MC.device.type, dtype=state_MC.dtype, requested=kernel
    )
    return run(tokens_M, table_VC, table_norm_C, state_MC, state_norm_C, eps)


def embed_norms_limbs(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
    form: LimbForm,
    kernel: str | None = None,
) -> tuple[Limbs, torch.Tensor]:
    """Returns (to_limbs(both), normed states) of embed_norms, in one pass."""
    op = "embed_norms_limbs"
    _check_embed_norms(op, tokens_M, table_VC, table_norm_C, state_MC, state_norm_C)
    check_limb_rows(f"{op} states", state_MC, state_MC.shape[1], form)
    run = _run_limbs(op, state_MC, kernel)
    return run(tokens_M, table_VC, table_norm_C, state_MC, state_norm_C, eps, form)


def _check_embed_norms(
    op: str,
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
) -> None:
    check_float(f"{op} states", state_MC)
    M, C = expect_ndim(f"{op} states", state_MC, 2)
    check_tensor(f"{op} tokens", tokens_M, (M,), (torch.int64,), state_MC)
    check_tensor(f"{op} table", table_VC, (None, C), (state_MC.dtype,), state_MC)
    if not table_VC.is_contiguous():
        raise KernelError(f"{op} table", "expected a contiguous table")
    check_norm(f"{op} norm of states", state_norm_C, state_MC)
    check_tensor(f"{op} norm of the table", table_norm_C, (C,), (state_norm_C.dtype,), state_MC)


def _run_limbs(op: str, x: LinearOutput, kernel: str | None):
    return dispatch.implementation(
        op, device=x.device.type, dtype=x.dtype, requested=kernel, in_features=x.shape[1]
    )


def check_quantized(
    op: str,
    x: LinearOutput,
    activation: ActivationSpec,
    scale: torch.Tensor | None,
    parts: bool = False,
) -> None:
    """Raise KernelError unless x [M, C] can be rounded so: a scale [] if static, else None."""
    check_float(f"{op} x", x, parts)
    expect_ndim(f"{op} x", x, 2)
    if (scale is None) != activation.dynamic:
        expected = "None" if activation.dynamic else "one number"
        raise KernelError(f"{op} scale", f"expected {expected} for {activation}")
    if scale is not None:
        check_tensor(f"{op} scale", scale, (), (torch.float32,), x)


def check_limbs(
    op: str, x: LinearOutput, form: LimbForm, halves: int = 1, parts: bool = False
) -> None:
    """Raise KernelError unless x [M, halves K] can become limbs."""
    _, width = expect_ndim(f"{op} x", x, 2)
    if width % halves:
        raise KernelError(f"{op} x", f"an odd width, found {list(x.shape)}")
    check_limb_rows(f"{op} x", x, width // halves, form, parts)
