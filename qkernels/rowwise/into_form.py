"""Norms and activations whose result has the form that the next linear takes (linear/plan.py).

Legend as in ops.py.
"""

import torch

from qkernels.linear.plan import InputForm, LinearInput
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import LinearOutput
from qkernels.rowwise import ops
from qkernels.rowwise.branch import PLAIN, Branch


def in_form(x_MK: torch.Tensor, form: InputForm) -> LinearInput:
    """A tensor in a form."""
    if isinstance(form, InputRounding):
        return Codes(*ops.quantize_input(x_MK, *form))
    if isinstance(form, LimbForm):
        return ops.to_limbs(x_MK, form)
    return x_MK


def rms_norm_into(
    x_MC: torch.Tensor, weight_C: torch.Tensor, eps: float, form: InputForm
) -> LinearInput:
    """rms_norm in a form."""
    if isinstance(form, InputRounding):
        return Codes(*ops.rms_norm_quantize(x_MC, weight_C, eps, *form))
    if isinstance(form, LimbForm):
        return ops.rms_norm_limbs(x_MC, weight_C, eps, form)
    return ops.rms_norm(x_MC, weight_C, eps)


def embed_norms_into(
    tokens_M: torch.Tensor,
    table_VC: torch.Tensor,
    table_norm_C: torch.Tensor,
    state_MC: torch.Tensor,
    state_norm_C: torch.Tensor,
    eps: float,
    form: InputForm,
) -> tuple[LinearInput, torch.Tensor]:
    """embed_norms, both in a form, the normed states as a tensor."""
    inputs = tokens_M, table_VC, table_norm_C, state_MC, state_norm_C, eps
    if isinstance(form, LimbForm):
        return ops.embed_norms_limbs(*inputs, form)
    both_M2C, normed_MC = ops.embed_norms(*inputs)
    return in_form(both_M2C, form), normed_MC


def add_rms_norm_into(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    form: InputForm,
    branch: Branch = PLAIN,
) -> tuple[LinearInput, torch.Tensor]:
    """add_rms_norm, the norm in a form, the sum as a tensor."""
    if isinstance(form, InputRounding):
        *codes, total_MC = ops.add_rms_norm_quantize(
            x_MC, residual_MC, weight_C, eps, *form, branch=branch
        )
        return Codes(*codes), total_MC
    if isinstance(form, LimbForm):
        return ops.add_rms_norm_limbs(x_MC, residual_MC, weight_C, eps, form, branch=branch)
    return ops.add_rms_norm(x_MC, residual_MC, weight_C, eps, branch)


def silu_and_mul_into(x_M2I: torch.Tensor, form: InputForm) -> LinearInput:
    """silu_and_mul in a form."""
    if isinstance(form, InputRounding):
        return Codes(*ops.silu_and_mul_quantize(x_M2I, *form))
    if isinstance(form, LimbForm):
        return ops.silu_and_mul_limbs(x_M2I, form)
    return ops.silu_and_mul(x_M2I)


def gelu_and_mul_into(x_M2I: torch.Tensor, form: InputForm) -> LinearInput:
    """gelu_and_mul in a form."""
    if isinstance(form, InputRounding):
        return Codes(*ops.gelu_and_mul_quantize(x_M2I, *form))
    if isinstance(form, LimbForm):
        return ops.gelu_and_mul_limbs(x_M2I, form)
    return ops.gelu_and_mul(x_M2I)
