"""What comes before a linear, in the form that the linear takes. Knows no kernel.

A form is how a weight takes so many rows: as 8-bit codes (InputRounding), as limbs (LimbForm), or
as they are (None). What a linear before it leaves in parts of K is added on the way. Legend as in
ops.py.
"""

import torch

from qkernels import ops
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import Consumer, LinearOutput

InputForm = InputRounding | LimbForm | None
LinearInput = torch.Tensor | Codes | Limbs


def input_form(weight: PreparedWeight, rows: int) -> InputForm:
    """How to hand a weight so many rows of inputs, so that nothing is left to do before it."""
    return weight.input_rounding or ops.limb_form(weight, rows)


def linear(
    x: LinearInput,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    consumer: Consumer | None = None,
) -> LinearOutput:
    """The product, whatever the form; with a reader, parts of K may be left to it."""
    if isinstance(x, Codes):
        return ops.linear_codes(*x, weight, bias)
    if isinstance(x, Limbs):
        return ops.linear_limbs(x, weight, bias)
    if consumer is not None:
        return ops.linear_split_k(consumer, x, weight, bias)
    return ops.linear(x, weight, bias)


def rms_norm(
    x_MC: torch.Tensor, weight_C: torch.Tensor, eps: float, form: InputForm
) -> LinearInput:
    """ops.rms_norm in a form."""
    if isinstance(form, InputRounding):
        return Codes(*ops.rms_norm_quantize(x_MC, weight_C, eps, *form))
    if isinstance(form, LimbForm):
        return ops.rms_norm_limbs(x_MC, weight_C, eps, form)
    return ops.rms_norm(x_MC, weight_C, eps)


def add_rms_norm(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    form: InputForm,
) -> tuple[LinearInput, torch.Tensor]:
    """ops.add_rms_norm, its norm in a form; the sum as it is."""
    if isinstance(form, InputRounding):
        *codes, total_MC = ops.add_rms_norm_quantize(x_MC, residual_MC, weight_C, eps, *form)
        return Codes(*codes), total_MC
    if isinstance(form, LimbForm):
        return ops.add_rms_norm_limbs(x_MC, residual_MC, weight_C, eps, form)
    return ops.add_rms_norm(x_MC, residual_MC, weight_C, eps)


def silu_and_mul(x_M2I: torch.Tensor, form: InputForm) -> LinearInput:
    """ops.silu_and_mul in a form."""
    if isinstance(form, InputRounding):
        return Codes(*ops.silu_and_mul_quantize(x_M2I, *form))
    if isinstance(form, LimbForm):
        return ops.silu_and_mul_limbs(x_M2I, form)
    return ops.silu_and_mul(x_M2I)
