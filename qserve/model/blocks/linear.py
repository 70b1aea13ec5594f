"""Linear layers of the decoder: float, or quantized and prepared for their kernel.

`plan(rows, consumer)` decides how a layer runs for a number of rows: the form of its input, and the
form of its output for the consumer, which is the only operation that reads the output.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from qkernels import QuantLinear, ops
from qkernels.choice import FIXED_ORDER
from qkernels.linear.plan import GemmPlan
from qkernels.linear.prepared import PreparedWeight
from qkernels.lora.weights import LoraWeights
from qkernels.moe.experts import PreparedExperts
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.limbs import Limbs
from qkernels.operands.split_k import Consumer, LinearOutput, reduced
from qserve.parallel import row_chunks
from qserve.parallel.communicator import Communicator, RankPartial
from qserve.parallel.gather import gathered_columns

FLOAT_PLAN = GemmPlan(variant="float")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """Plans of several layers that share an input."""

    members: tuple[GemmPlan, ...]

    @property
    def input(self) -> InputForm:
        """Input form that suits all members; None: a tensor, as for members with static scales."""
        first, *others = (plan.input for plan in self.members)
        if isinstance(first, InputRounding) and first.scale is not None:
            return None
        return first if all(each == first for each in others) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPlan:
    """Plan of a layer in a step with adapters. The adapters read the layer's input as a tensor."""

    base: GemmPlan | None  # None: a plan that accepts any input
    input: InputForm = None  # input form of the base; it must include the tensor

    @property
    def adds_adapters(self) -> bool:
        """True if the base's kernel adds the adapters; otherwise a separate kernel adds them."""
        return self.base is not None and self.base.adds_adapters


LinearPlan = GemmPlan | SplitPlan | AdaptedPlan


class FloatLinear(torch.nn.Module):
    """y = x W^T + b with a dense weight [N, K].

    `names`: linears of the checkpoint that are merged into the weight. `fixed_order`: the bits of a
    row do not depend on the other rows.
    """

    def __init__(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        names: tuple[str, ...] = (),
        *,
        fixed_order: bool = False,
    ) -> None:
        super().__init__()
        self.names, self.fixed_order = names, fixed_order
        self.register_buffer("weight", weight_NK)
        self.register_buffer("bias", bias_N)

    def plan(self, rows: int, consumer: Consumer | None = None) -> GemmPlan:
        """Return the plan with tensors as input and output."""
        return FLOAT_PLAN

    def forward(
        self, x: torch.Tensor, plan: LinearPlan | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the product. `out`: [M, N] to write it to, for x [M, K]."""
        if self.fixed_order:
            y = ops.fixed_order_linear(x, self.weight, self.bias)
        elif out is None:
            return functional.linear(x, self.weight, self.bias)
        elif self.bias is None:
            return torch.mm(x, self.weight.T, out=out)
        else:
            return torch.addmm(self.bias, x, self.weight.T, out=out)
        return y if out is None else out.copy_(y)


class SplitLinear(torch.nn.Module):
    """Linears with a shared input that cannot be merged into one matrix; outputs are joined."""

    def __init__(self, members: "list[FloatLinear | QuantLinear]") -> None:
        super().__init__()
        self.members = torch.nn.ModuleList(members)

    def plan(self, rows: int, consumer: Consumer | None = None) -> SplitPlan:
        """Plan each member without a consumer, because the consumer reads all outputs together."""
        return SplitPlan(members=tuple(member.plan(rows) for member in self.members))

    def forward(self, x: LinearInput, plan: SplitPlan | None = None) -> torch.Tensor:
        plans = [None] * len(self.members) if plan is None or plan.input is None else plan.members
        outputs = [member(x, own) for member, own in zip(self.members, plans, strict=True)]
        return torch.cat(outputs, -1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatheredInput:
    """Describes inputs of a layer that are gathered from several ranks."""

    widths: tuple[int, ...]  # number of channels that each rank produces
    order_K: torch.Tensor  # indices of the gathered channels that this rank reads


class RowParallel(torch.nn.Module):
    """A linear whose inputs are sharded over ranks. Each rank computes a partial sum.

    The product of many rows is computed in chunks. While a chunk is computed, those before it are
    sent to the other ranks, so that the sum over ranks takes little time of its own.
    """

    overlaps = True  # False: the result is not summed before another operation reads it

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
        """Return the plan of the inner layer. Gathered inputs are always a tensor."""
        plan = self.inner.plan(rows, consumer)
        return plan if self.order is None else replace(plan, input=None)

    def forward(self, x: LinearInput, plan: LinearPlan | None = None) -> RankPartial:
        """Return this rank's partial sum, the input of the next norm."""
        if self.order is not None:
            x = gathered_columns(self.communicator, x, self.widths)[:, self.order]
        if not isinstance(x, Limbs) and len(_rows_of(x)) >= row_chunks.MIN_ROWS:
            found = self._in_chunks(x)
            if found is not None:
                return found
        return RankPartial(x=self.inner(x, plan), communicator=self.communicator)

    def _in_chunks(self, x: torch.Tensor | Codes) -> RankPartial | None:
        """Compute and send one chunk of rows after the other.

        Returns None if the sum cannot be sent in chunks. Adapters are applied to all rows together.
        """
        inner, rows_MK = self.inner, _rows_of(x)
        if isinstance(inner, AdaptedLinear) and inner.rows.slots_T is None:
            inner = inner.base
        chunks = row_chunks.row_chunks(len(rows_MK))
        if not (chunks and self.overlaps and isinstance(inner, FloatLinear | QuantLinear)):
            return None
        if isinstance(inner, QuantLinear):
            shape, dtype = (len(rows_MK), inner.out_features), inner.prepared_weight.dtype
        else:
            shape, dtype = (len(rows_MK), len(inner.weight)), inner.weight.dtype
        y_MC = torch.empty(shape, dtype=dtype, device=rows_MK.device)
        row_sum = self.communicator.begin_sum(y_MC)
        if row_sum is None:
            return None
        for start, stop in chunks:
            chunk = slice(start, stop)
            part = Codes(*(each[chunk] for each in x)) if isinstance(x, Codes) else x[chunk]
            inner(part, inner.plan(stop - start), out=y_MC[chunk])
            row_sum.send(start, stop)
        return RankPartial(x=y_MC, communicator=self.communicator, row_sum=row_sum)


def _rows_of(x: torch.Tensor | Codes) -> torch.Tensor:
    """Return the tensor with the rows of x."""
    return x.codes_MK if isinstance(x, Codes) else x


class GatheredLinear(torch.nn.Module):
    """A linear whose outputs are sharded over ranks and gathered on each rank: the LM head."""

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
    """The adapter slot of each row in the running step, shared by all adapted layers."""

    def __init__(self) -> None:
        self.slots_T: torch.Tensor | None = None  # int32, -1: no adapter; None: no row has one


class AdaptedLinear(torch.nn.Module):
    """A linear plus the LoRA adapters of a step's rows.

    `fixed_order`: the bits of a row do not depend on the other rows or on their adapters.
    """

    def __init__(
        self,
        base: "FloatLinear | QuantLinear | SplitLinear",
        weights: LoraWeights,
        rows: AdaptedRows,
        *,
        fixed_order: bool = False,
    ) -> None:
        super().__init__()
        self.base = base
        self.weights, self.rows = weights, rows
        self.fixed_order = fixed_order
        self._kernel = FIXED_ORDER if fixed_order else None

    def plan(self, rows: int, consumer: Consumer | None = None) -> LinearPlan:
        """Return the plan of the base if no row has an adapter, else a plan with adapters.

        With `fixed_order` it is always the plan with adapters, because an input that the previous
        operation rounds to codes has other bits than an input that is rounded afterwards.
        """
        if self.rows.slots_T is None and not self.fixed_order:
            return self.base.plan(rows, consumer)
        if not isinstance(self.base, QuantLinear):
            return AdaptedPlan(base=None)
        base = self.base.plan(rows, consumer, self.weights.sizes)
        return AdaptedPlan(base=base, input=base.input)

    def forward(self, x: LinearInput, plan: LinearPlan | None = None) -> LinearOutput:
        slots_T = self.rows.slots_T
        base_plan = plan.base if isinstance(plan, AdaptedPlan) else plan
        if slots_T is None:
            return self.base(x, base_plan)
        x_TK = x.tensor if isinstance(x, Limbs) else x
        # Launched before the product, which can load its weights meanwhile.
        if plan is not None and plan.adds_adapters:
            term = ops.lora_term(x_TK, slots_T, self.weights)
            return self.base(x, base_plan, term)
        h_TSR = ops.lora_shrink(x_TK, slots_T, self.weights, self._kernel)
        y = self.base(x, base_plan)
        ops.lora_expand_(y, h_TSR, slots_T, self.weights, self._kernel)
        return y


Linear = FloatLinear | QuantLinear | SplitLinear | RowParallel | GatheredLinear | AdaptedLinear
Product = tuple[PreparedWeight | PreparedExperts, Consumer | None]


def applied(linear: Linear, x_TK: torch.Tensor) -> torch.Tensor:
    """Return a layer's output as a tensor; the input is a tensor too."""
    plan = linear.plan(x_TK.shape[0])
    return reduced(linear(ops.in_form(x_TK, plan.input), plan))


def products_of(linear: Linear, consumer: Consumer | None) -> Iterator[Product]:
    """Yield the prepared weights of a linear, each with the operation that consumes its result."""
    if isinstance(linear, AdaptedLinear):
        yield from products_of(linear.base, consumer)
    elif isinstance(linear, RowParallel | GatheredLinear):
        yield from products_of(linear.inner, consumer)
    elif isinstance(linear, SplitLinear):
        for member in linear.members:
            yield from products_of(member, None)
    elif isinstance(linear, QuantLinear):
        yield linear.prepared_weight, consumer
