"""Norms, activations and their rounding in plain torch: the definition that kernels follow.

Legend: M rows of x, K inputs, C channels, I intermediate size.
"""

import torch
import torch.nn.functional as F

from formats.activation import MIN_INPUT_SCALE
from formats.activation import quantize_input as round_input
from formats.scheme import ActivationSpec
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.limbs_reference import to_limbs
from qkernels.operands.split_k import LinearOutput, reduced
from qkernels.rowwise.branch import PLAIN, Branch


def quantize_input(
    x_MK: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] to (codes [M, K], scales [M, S]); groups may make the codes wider."""
    return round_input(x_MK, activation, scale)


def quantize_input_asymmetric(
    x_MK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] to int8 codes, float32 scales and int32 zeros [M, 1]: scale * (code - zero).

    The 256 codes span each row's values and 0; rounding is half to even.
    """
    x = x_MK.float()
    low_M1 = x.amin(1, keepdim=True).clamp(max=0)
    high_M1 = x.amax(1, keepdim=True).clamp(min=0)
    scales_M1 = ((high_M1 - low_M1) / 255).clamp(min=MIN_INPUT_SCALE)
    zeros_M1 = (-128 - low_M1 / scales_M1).round().clamp(-128, 127)
    codes = ((x / scales_M1).round() + zeros_M1).clamp(-128, 127)
    return codes.to(torch.int8), scales_M1, zeros_M1.to(torch.int32)


def rms_norm(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dim, rounding where transformers' LlamaRMSNorm does.

    With a float32 weight where its GemmaRMSNorm does.
    """
    x_float = x.float()
    normed = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return (weight_C * normed.to(weight_C.dtype)).to(x.dtype)


def add_rms_norm(
    x: LinearOutput,
    residual: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    branch: Branch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(b + residual), b + residual), b being x after the branch's changes.

    What is made on the way is rounded: by the branch's norm, by its factor, and the sum.
    """
    x = reduced(x)
    if branch.norm_C is not None:
        x = rms_norm(x, branch.norm_C, branch.eps)
    if branch.factor != 1:
        x = x * branch.factor
    total = x + residual
    return total if weight_C is None else rms_norm(total, weight_C, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x [..., 2 I] is gate beside up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation, where x [..., 2 I] is gate beside up."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rms_norm_quantize(
    x_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input of rms_norm."""
    return quantize_input(rms_norm(x_MC, weight_C, eps), activation, scale)


def add_rms_norm_quantize(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    branch: Branch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """quantize_input of add_rms_norm, and the sum."""
    normed_MC, total_MC = add_rms_norm(x_MC, residual_MC, weight_C, eps, branch)
    return *quantize_input(normed_MC, activation, scale), total_MC


def silu_and_mul_quantize(
    x_M2I: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input of silu_and_mul."""
    return quantize_input(silu_and_mul(x_M2I), activation, scale)


def gelu_and_mul_quantize(
    x_M2I: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input of gelu_and_mul."""
    return quantize_input(gelu_and_mul(x_M2I), activation, scale)


def rms_norm_limbs(x_MC: torch.Tensor, weight_C: torch.Tensor, eps: float, form: LimbForm) -> Limbs:
    """to_limbs of rms_norm."""
    return to_limbs(rms_norm(x_MC, weight_C, eps), form)


def embed_norms(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.embed_norms."""
    embedded_MC = rms_norm(table_VC[tokens_M], table_norm_C, eps)
    normed_MC = rms_norm(state_MC, state_norm_C, eps)
    return torch.cat([embedded_MC, normed_MC], 1), normed_MC


def embed_norms_limbs(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
    form: LimbForm,
) -> tuple[Limbs, torch.Tensor]:
    """to_limbs of embed_norms, and the normed states."""
    out, normed_MC = embed_norms(tokens_M, table_VC, table_norm_C, state_MC, state_norm_C, eps)
    return to_limbs(out, form), normed_MC


def add_rms_norm_limbs(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    form: LimbForm,
    branch: Branch = PLAIN,
) -> tuple[Limbs, torch.Tensor]:
    """to_limbs of add_rms_norm, and the sum."""
    normed_MC, total_MC = add_rms_norm(x_MC, residual_MC, weight_C, eps, branch)
    return to_limbs(normed_MC, form), total_MC


def silu_and_mul_limbs(x_M2I: torch.Tensor, form: LimbForm) -> Limbs:
    """to_limbs of silu_and_mul."""
    return to_limbs(silu_and_mul(x_M2I), form)


def gelu_and_mul_limbs(x_M2I: torch.Tensor, form: LimbForm) -> Limbs:
    """to_limbs of gelu_and_mul."""
    return to_limbs(gelu_and_mul(x_M2I), form)
