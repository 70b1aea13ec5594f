"""Forms in which a linear takes its input: a tensor as it is, 8-bit codes, or limbs."""

from dataclasses import replace

import torch

from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.limbs import LimbForm, Limbs

InputForm = InputRounding | LimbForm | None  # None: a tensor as it is
LinearInput = torch.Tensor | Codes | Limbs


def with_tensor(form: InputForm) -> InputForm:
    """The form to produce when another consumer reads the result as a tensor."""
    return replace(form, with_tensor=True) if isinstance(form, LimbForm) else None
