"""SiLU-gated feed-forward. Knows what follows it: a norm."""

import torch

from qkernels import input_forms
from qkernels.input_forms import LinearInput
from qkernels.partial_sums import LinearOutput
from qserve.model.blocks.linear import Linear


class GatedMlp(torch.nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up come from one matrix."""

    def __init__(self, *, gate_up_proj: Linear, down_proj: Linear) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    @property
    def first_linear(self) -> Linear:
        """Whose form of input `forward` takes."""
        return self.gate_up_proj

    def forward(self, x_TC: LinearInput) -> LinearOutput:
        """The result is for the norm that follows."""
        hidden_T2I = self.gate_up_proj(x_TC)
        form = self.down_proj.input_form(hidden_T2I.shape[0])
        return self.down_proj(input_forms.silu_and_mul(hidden_T2I, form), "norm")
