"""Types for a linear's input as 8-bit codes, and for the rounding that makes them."""

from typing import NamedTuple

import torch

from formats.scheme import ActivationSpec


class Codes(NamedTuple):
    """A linear's input, already rounded to 8-bit codes, as ops.linear_codes takes it."""

    codes_MK: torch.Tensor  # int8 or float8_e4m3fn
    scales_M1: torch.Tensor  # float32


class InputRounding(NamedTuple):
    """How a linear's input is rounded to Codes.

    It is an input form for ops.norm and ops.activate.
    """

    activation: ActivationSpec
    scale: torch.Tensor | None  # float32 [], the static scale; None: dynamic scales


CODE_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}
