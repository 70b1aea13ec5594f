"""A linear's input rounded to 8-bit codes, and how it is rounded."""

from typing import NamedTuple

import torch

from formats.scheme import ActivationSpec


class Codes(NamedTuple):
    """A linear's input that is rounded already, as ops.linear_codes takes it."""

    codes_MK: torch.Tensor  # int8 or float8_e4m3fn
    scales_M1: torch.Tensor  # float32


class InputRounding(NamedTuple):
    """How a linear rounds its input to Codes: a form of ops.norm and ops.activate."""

    activation: ActivationSpec
    scale: torch.Tensor | None  # float32 [], of a static activation


CODE_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}
