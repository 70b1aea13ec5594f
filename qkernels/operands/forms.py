"""Forms of a linear's input: a plain tensor, 8-bit codes, or limbs."""

from dataclasses import replace

import torch

from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.limbs import LimbForm, Limbs

InputForm = InputRounding | LimbForm | None  # None: a plain tensor
LinearInput = torch.Tensor | Codes | Limbs


def with_tensor(form: InputForm) -> InputForm:
    """Return the form to produce if another consumer also reads the input as a tensor."""
    return replace(form, with_tensor=True) if isinstance(form, LimbForm) else None
