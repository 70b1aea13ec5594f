"""A weight in the form that one kernel reads. Knows not what its tensors mean.

Made once at load, never written to a file: files and state_dict hold the GPTQ tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from formats.scheme import ActivationSpec, QuantSpec


class Codes(NamedTuple):
    """A linear's input that is rounded already, as ops.linear_codes takes it."""

    codes_MK: torch.Tensor  # int8 or float8_e4m3fn
    scales_M1: torch.Tensor  # float32


class InputRounding(NamedTuple):
    """How a linear rounds its input to Codes: the last arguments of ops.*_quantize."""

    activation: ActivationSpec
    scale: torch.Tensor | None  # float32 [], of a static activation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedWeight:
    """One kernel's private copy of a weight [N, K], for activations of `dtype`."""

    kernel: str  # the row of qkernels.dispatch that made it and that must run it
    tensors: dict[str, torch.Tensor]
    spec: QuantSpec
    out_features: int
    in_features: int
    dtype: torch.dtype
    # set by ops.prepare_weight: column j of the weight takes input input_order[j]; None: input j
    input_order: torch.Tensor | None = None
    activation: ActivationSpec | None = None  # how the row rounds its input; None: not at all

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def input_rounding(self) -> InputRounding | None:
        """How to make the codes that ops.linear_codes takes; None: it takes none."""
        if self.activation is None or self.activation.per == "group":
            return None
        return InputRounding(self.activation, self.tensors.get("input_scale"))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def sorted_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] with its inputs in the order of the weight's columns."""
        return x if self.input_order is None else x.index_select(-1, self.input_order)

    def to(self, device: torch.device | str) -> "PreparedWeight":
        """The same on another device of the same type."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        order = None if self.input_order is None else self.input_order.to(device)
        return replace(self, tensors=tensors, input_order=order)


def linear_by_codes(
    x: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    quantize_input: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    linear_codes: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """x [..., K] to [..., N] of a weight with 8-bit activations: rounded to codes, multiplied."""
    codes_MK, scales_MS = quantize_input(
        x.reshape(-1, weight.in_features), weight.activation, weight.tensors.get("input_scale")
    )
    return linear_codes(codes_MK, scales_MS, weight, bias).view(*x.shape[:-1], weight.out_features)
