"""Linear layers of the decoder: float, or quantized and prepared for their kernel.

`plan(rows, consumer)` says how a layer runs so many rows: what the operation before it makes, and
what the consumer, the one operation that takes the result, gets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from qkernels import QuantLinear, ops
from qkernels.linear.plan import GemmPlan, InputForm, LinearInput
from qkernels.linear.prepared import PreparedWeight
from qkernels.lora.weights import LoraWeights
from qkernels.moe.experts import PreparedExperts
from qkernels.operands.codes import InputRounding
from qkernels.operands.limbs import Limbs
from qkernels.operands.split_k import Consumer, LinearOutput
from qserve.parallel.communicator import Communicator, RankPartial
from qserve.parallel.gather import gathered_columns

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPlan:
    """The plan of a layer in a step that has adapters: they read its input as a tensor."""

    base: GemmPlan | None  # None: that of any input
    input: InputForm = None  # of the base, where that has the tensor, too

    @property
    def adds_adapters(self) -> bool:
        """Whether the base's product does; else it is left to a kernel behind it."""
        return self.base is not None and self.base.adds_adapters


LinearPlan = GemmPlan | SplitPlan | AdaptedPlan


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatheredInput:
    """Which inputs a layer reads that are made by other ranks, too."""

    widths: tuple[int, ...]  # channels that each rank makes
    order_K: torch.Tensor  # those that this rank reads


class RowParallel(torch.nn.Module):
    """A layer whose inputs are shared out over ranks: each has a part of the sum."""

    def __init__(
        self,
        inner: "FloatLinear | QuantLinear | SplitLinear",
        communicator: Communicator,
        gathered: GatheredInput | None = None,
    ) -> None:
        super().__init__()
        self.inner, self.communicator = inner, communicator
        self.widths = gathered.widths if gathered is not None else ()
        self.register_buffer("order", gathered.order_K if gathered is not None else None)

    def plan(self, rows: int, consumer: Consumer | None = None) -> LinearPlan:
        """The inner layer's, of whose output the communicator takes the place of the consumer."""
        plan = self.inner.plan(rows, consumer)
        return plan if self.order is None else replace(plan, input=None)

    def forward(self, x: LinearInput, plan: LinearPlan | None = None) -> RankPartial:
        """The result is for the norm that follows."""
        if self.order is not None:
            x = gathered_columns(self.communicator, x, self.widths)[:, self.order]
        return RankPartial(x=self.inner(x, plan), communicator=self.communicator)


class GatheredLinear(torch.nn.Module):
    """A layer whose outputs are shared out over ranks, and gathered on each: the head."""

    def __init__(
        self,
        inner: "FloatLinear | QuantLinear | SplitLinear",
        communicator: Communicator,
        widths: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.inner, self.communicator, self.widths = inner, communicator, widths

    def plan(self, rows: int, consumer: Consumer | None = None) -> LinearPlan:
        return self.inner.plan(rows)

    def forward(self, x: LinearInput, plan: LinearPlan | None = None) -> torch.Tensor:
        return gathered_columns(self.communicator, self.inner(x, plan), self.widths)


class AdaptedRows:
    """Which adapter each row of the running step has. All adapted layers of a decoder share one."""

    def __init__(self) -> None:
        self.slots_T: torch.Tensor | None = None  # int32, -1: none; None: no row has one


class AdaptedLinear(torch.nn.Module):
    """A layer, and what the adapters of a step's rows add to its result."""

    def __init__(
        self,
        base: "FloatLinear | QuantLinear | SplitLinear",
        weights: LoraWeights,
        rows: AdaptedRows,
    ) -> None:
        super().__init__()
        self.base = base
        self.weights, self.rows = weights, rows

    def plan(self, rows: int, consumer: Consumer | None = None) -> LinearPlan:
        """That of the base where no row has an adapter."""
        if self.rows.slots_T is None:
            return self.base.plan(rows, consumer)
        if not isinstance(self.base, QuantLinear):
            return AdaptedPlan(base=None)
        base = self.base.plan(rows, consumer, self.weights.sizes)
        return AdaptedPlan(base=base, input=base.input)

    def forward(self, x: LinearInput, plan: LinearPlan | None = None) -> LinearOutput:
        slots_T = self.rows.slots_T
        if slots_T is None:
            return self.base(x, plan)
        x_TK = x.tensor if isinstance(x, Limbs) else x
        # Before the product, whose weights are on their way meanwhile.
        if plan is not None and plan.adds_adapters:
            term = ops.lora_term(x_TK, slots_T, self.weights)
            return self.base(x, plan.base, term)
        h_TSR = ops.lora_shrink(x_TK, slots_T, self.weights)
        y = self.base(x, None if plan is None else plan.base)
        ops.lora_expand_(y, h_TSR, slots_T, self.weights)
        return y


Linear = FloatLinear | QuantLinear | SplitLinear | RowParallel | GatheredLinear | AdaptedLinear
Product = tuple[PreparedWeight | PreparedExperts, Consumer | None]


def products_of(linear: Linear, consumer: Consumer | None) -> Iterator[Product]:
    """The prepared weights of a linear, each with the operation that takes its result."""
    if isinstance(linear, AdaptedLinear):
        yield from products_of(linear.base, consumer)
    elif isinstance(linear, RowParallel | GatheredLinear):
        yield from products_of(linear.inner, consumer)
    elif isinstance(linear, SplitLinear):
        for member in linear.members:
            yield from products_of(member, None)
    elif isinstance(linear, QuantLinear):
        yield linear.prepared_weight, consumer
