"""A call of a public operation that is compiled for every card."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from formats.scheme import ActivationSpec
from qkernels.operands.codes import InputRounding
from qkernels.operands.limbs import LimbForm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn
INTEGERS, FLOATS = ActivationSpec(), ActivationSpec(type="float")
ROUNDED = InputRounding(INTEGERS, None)
SYMMETRIC, ASYMMETRIC = LimbForm(bits=4), LimbForm(bits=8, with_sums=True)
SM80, SM90 = ("sm_80",), ("sm_90",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`product`: the instruction that one of its kernels multiplies with on sm_90."""

    run: Callable[[], object]
    quick: tuple[str, ...] = ()  # cards that compile it without --all-cards
    product: Literal["mma", "wgmma"] | None = None
    least: int = 80  # the first architecture that has what it takes
