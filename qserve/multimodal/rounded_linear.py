"""RoundedLinear: a linear of a vision tower with weights and inputs of 8 bits."""

import re

import torch

from formats.errors import InputError, one_line
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.scheme import Scheme
from qkernels import ops
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.forms import InputForm, LinearInput

SETTING = "--mm-encoder-quantization"
# Embeddings, mergers and projectors stay in float.
IN_LAYERS = re.compile(r"^(visual|vision_tower|vision_model)\..*(blocks|layers)\.\d+\.")


class RoundedLinear(torch.nn.Module):
    """y = x W^T + b. Weights are rounded to nearest, inputs row by row as they come."""

    def __init__(self, weight: PreparedWeight, bias_N: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("bias", bias_N)

    @classmethod
    def of(cls, linear: torch.nn.Linear, scheme: Scheme, name: str) -> "RoundedLinear":
        """Round a linear. Raises InputError where no kernel takes its size."""
        try:
            packed = round_to_nearest(linear.weight, scheme.weight, name)
            packed = with_activation(packed, scheme, None, name)
            return cls(ops.prepare_weight(packed, linear.weight.dtype), linear.bias)
        except InputError as error:
            raise InputError(
                f"{SETTING} {scheme}",
                f"does not fit {name} of the vision tower: {one_line(error)}",
                "use another scheme, or leave the tower in float",
            ) from error

    def form(self, rows: int) -> InputForm:
        """Return the form in which it takes `rows` of inputs from the operation before it."""
        return ops.plan_linear(self.weight, rows).input

    def forward(self, x: LinearInput) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


def round_layers_(model: torch.nn.Module, scheme: Scheme) -> None:
    """Replace the linears in the layers of a model's vision tower. Raises InputError."""
    chosen = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and IN_LAYERS.match(name)
    ]
    for name in chosen:
        parent, _, leaf = name.rpartition(".")
        rounded = RoundedLinear.of(model.get_submodule(name), scheme, name)
        setattr(model.get_submodule(parent), leaf, rounded)
