"""Per-layer embeddings: every layer gets an additional input for each token.

T: tokens of the step. C: hidden size. L: layers. P: width of a layer's input.
"""

from collections.abc import Iterator

import torch

from qkernels import ops
from qkernels.operands.split_k import reduced
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.linear import FloatLinear, Linear, Product, products_of
from qserve.model.blocks.norm import BranchEnd, Norm


class LayerInputs(torch.nn.Module):
    """Computes the inputs of all layers from a table and from the token embeddings x.

    The inputs are (norm(projection(x) C^-0.5) + rows) / sqrt(2), with a norm over the P channels of
    each layer.
    """

    def __init__(
        self,
        *,
        table: Embedding,
        projection: FloatLinear,
        norm: Norm,
        num_tokens: int | None = None,  # rows of the table; larger token ids use row 0; None: all
    ) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.table, self.projection, self.norm = table, projection, norm
        self.width = norm.weight.shape[0]

    def forward(
        self, token_ids_T: torch.Tensor, x_TC: torch.Tensor, positions_T: torch.Tensor
    ) -> torch.Tensor:
        """Return the inputs of all layers, [T, L, P]. `x_TC`: embeddings of the tokens."""
        made = self.projection(x_TC) * x_TC.shape[1] ** -0.5
        normed, _ = self.norm(made.reshape(-1, self.width), None, None)
        if self.num_tokens is not None:
            token_ids_T = torch.where(token_ids_T < self.num_tokens, token_ids_T, 0)
        rows = self.table(token_ids_T, positions_T).view(-1, self.width)
        return ((normed + rows) * 2**-0.5).view(len(token_ids_T), -1, self.width)


class LayerInput(torch.nn.Module):
    """x + norm(projection(gelu(gate(x)) * input))."""

    def __init__(self, *, gate: Linear, projection: Linear, norm: Norm) -> None:
        super().__init__()
        self.gate, self.projection, self.end = gate, projection, BranchEnd(norm)
        self.activation = ops.ActSpec(kind="gelu_tanh", gated=False)
        self._sum = Norm(None, 0.0)

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.gate, None)
        yield from products_of(self.projection, "norm")

    def forward(
        self, x_TC: torch.Tensor, input_TP: torch.Tensor, onto_TC: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the residual stream [T, C], or `onto_TC`, with the layer's input added."""
        rows = x_TC.shape[0]
        plan = self.gate.plan(rows)
        gate_TP = reduced(self.gate(ops.in_form(x_TC, plan.input), plan))
        gated_TP = ops.activate(gate_TP, self.activation) * input_TP
        plan = self.projection.plan(rows, "norm")
        added = self.projection(ops.in_form(gated_TP, plan.input), plan)
        _, sum_TC = self._sum(self.end(added), x_TC if onto_TC is None else onto_TC, None)
        return sum_TC
