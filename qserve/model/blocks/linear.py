"""Linear layers of the decoder: float, or quantized and prepared for their kernel.

`plan(rows, consumer)` says how a layer runs so many rows: what the operation before it makes, and
what the consumer, the one operation that takes the result, gets.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from qkernels import QuantLinear
from qkernels.linear.plan import GemmPlan, InputForm, LinearInput
from qkernels.linear.prepared import PreparedWeight
from qkernels.moe.experts import PreparedExperts
from qkernels.operands.codes import InputRounding
from qkernels.operands.split_k import Consumer

FLOAT_PLAN = GemmPlan(variant="float")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The plans of several layers that share an input."""

    members: tuple[GemmPlan, ...]

    @property
    def input(self) -> InputForm:
        """What all members take alike. A static input scale is each member's own."""
        first, *others = (plan.input for plan in self.members)
        if isinstance(first, InputRounding) and first.scale is not None:
            return None
        return first if all(each == first for each in others) else None


LinearPlan = GemmPlan | SplitPlan


class FloatLinear(torch.nn.Module):
    """y = x W^T + b with a dense weight [N, K]. `names` are the checkpoint's linears in it."""

    def __init__(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.names = names
        self.register_buffer("weight", weight_NK)
        self.register_buffer("bias", bias_N)

    def plan(self, rows: int, consumer: Consumer | None = None) -> GemmPlan:
        """A tensor in, a tensor out."""
        return FLOAT_PLAN

    def forward(self, x: torch.Tensor, plan: LinearPlan | None = None) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class SplitLinear(torch.nn.Module):
    """Layers of one input whose weights cannot be one matrix: their outputs stand side by side."""

    def __init__(self, members: "list[FloatLinear | QuantLinear]") -> None:
        super().__init__()
        self.members = torch.nn.ModuleList(members)

    def plan(self, rows: int, consumer: Consumer | None = None) -> SplitPlan:
        """None of the members knows the consumer, which takes all of their outputs."""
        return SplitPlan(members=tuple(member.plan(rows) for member in self.members))

    def forward(self, x: LinearInput, plan: SplitPlan | None = None) -> torch.Tensor:
        plans = [None] * len(self.members) if plan is None or plan.input is None else plan.members
        outputs = [member(x, own) for member, own in zip(self.members, plans, strict=True)]
        return torch.cat(outputs, -1)


Linear = FloatLinear | QuantLinear | SplitLinear
Product = tuple[PreparedWeight | PreparedExperts, Consumer | None]


def products_of(linear: Linear, consumer: Consumer | None) -> Iterator[Product]:
    """The prepared weights of a linear, each with the operation that takes its result."""
    if isinstance(linear, SplitLinear):
        for member in linear.members:
            yield from products_of(member, None)
    elif isinstance(linear, QuantLinear):
        yield linear.prepared_weight, consumer
