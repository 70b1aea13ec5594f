"""RoundedLinear: a linear of a vision tower whose weights and inputs are quantized."""

import re

import torch
import torch.nn.functional as F

from formats.errors import InputError, one_line
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.scheme import Scheme
from qkernels import ops
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.forms import InputForm, LinearInput

SETTING = "--mm-encoder-quantization"
# Names of linears inside of layers. Embeddings, mergers and projectors stay in float.
IN_LAYERS = re.compile(
    r"^(visual|vision_tower|vision_model|vision_encoder)\..*(blocks|layers?)\.\d+\."
)


# linears before an activation function, which maps zero to zero
INNER = ("linear_fc1", "fc1", "gate_proj", "up_proj")
# The kernels need a multiple of this number of inputs; SigLIP and Qwen3-VL have 4304.
MULTIPLE = 32


class RoundedLinear(torch.nn.Module):
    """Computes y = x W^T + b. Weights are rounded to nearest once, inputs row by row in each call.

    Inputs are padded with zeros to a multiple of 32. Before an activation function the outputs are
    padded too, so that the linear after it needs no padding.
    """

    def __init__(self, weight: PreparedWeight, bias_N: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("bias", bias_N)

    @classmethod
    def of(cls, linear: torch.nn.Linear, scheme: Scheme, name: str) -> "RoundedLinear":
        """Round a linear. Raises InputError if no kernel takes its size."""
        num_outputs, num_inputs = linear.weight.shape
        more_inputs = -num_inputs % MULTIPLE
        more_outputs = -num_outputs % MULTIPLE if name.rpartition(".")[2] in INNER else 0
        weight_NK = F.pad(linear.weight, (0, more_inputs, 0, more_outputs))
        bias_N = None if linear.bias is None else F.pad(linear.bias, (0, more_outputs))
        try:
            packed = round_to_nearest(weight_NK, scheme.weight, name)
            packed = with_activation(packed, scheme, None, name)
            return cls(ops.prepare_weight(packed, linear.weight.dtype), bias_N)
        except InputError as error:
            raise InputError(
                f"{SETTING} {scheme}",
                f"does not fit {name} of the vision tower: {one_line(error)}",
                "use another scheme, or leave the tower in float",
            ) from error

    def form(self, rows: int) -> InputForm:
        """Return the form in which this linear takes its inputs, for a number of rows."""
        return ops.plan_linear(self.weight, rows).input

    def forward(self, x: LinearInput) -> torch.Tensor:
        if isinstance(x, torch.Tensor) and x.shape[-1] < self.weight.in_features:
            x = F.pad(x, (0, self.weight.in_features - x.shape[-1]))
        return ops.linear(x, self.weight, self.bias)


def round_layers_(model: torch.nn.Module, scheme: Scheme) -> None:
    """Replace the linears in the layers of a model's vision tower in place. Raises InputError."""
    chosen = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and IN_LAYERS.match(name)
    ]
    for name in chosen:
        parent, _, leaf = name.rpartition(".")
        rounded = RoundedLinear.of(model.get_submodule(name), scheme, name)
        setattr(model.get_submodule(parent), leaf, rounded)
