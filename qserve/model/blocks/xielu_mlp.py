"""MLP with xIELU, an activation with learned slopes.

Huang and Schlag, "Deriving Activation Functions Using Integration" (2024).
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from qkernels import ops
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.linear import Linear, LinearPlan, Product, products_of


class XieluMlp(torch.nn.Module):
    """down(xielu(up(x))), in plain torch between the linears."""

    def __init__(
        self,
        *,
        up_proj: Linear,
        down_proj: Linear,
        alpha_p: torch.Tensor,  # float32 [1], as in the checkpoint: the slope is softplus of it
        alpha_n: torch.Tensor,
        beta: torch.Tensor,  # float32 []
        eps: torch.Tensor,
    ) -> None:
        super().__init__()
        self.up_proj, self.down_proj = up_proj, down_proj
        self.register_buffer("alpha_p", functional.softplus(alpha_p))
        self.register_buffer("alpha_n", beta + functional.softplus(alpha_n))
        self.register_buffer("beta", beta.reshape(1))
        self.register_buffer("eps", eps.reshape(1))

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.up_proj, None)
        yield from products_of(self.down_proj, "norm")

    def plan(self, rows: int) -> LinearPlan:
        """Return the plan of the first linear, which sets the output form of the norm before it."""
        return self.up_proj.plan(rows)

    def forward(self, x_TC: LinearInput, plan: LinearPlan) -> LinearOutput:
        """Return the MLP's result, the input of the next norm."""
        hidden_TI = reduced(self.up_proj(x_TC, plan))
        down = self.down_proj.plan(hidden_TI.shape[0], "norm")
        return self.down_proj(ops.in_form(self._activated(hidden_TI), down.input), down)

    def _activated(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return alpha_p x^2 + beta x above 0, else alpha_n (exp(x) - 1 - x) + beta x.

        Computed in float32 and rounded once; `eps` bounds the exponent from above.
        """
        x = x_TI.float()
        negative = torch.expm1(torch.minimum(x, self.eps)).sub_(x).mul_(self.alpha_n)
        bent = torch.where(x > 0, self.alpha_p * x * x, negative)
        return bent.add_(x * self.beta).to(x_TI.dtype)
