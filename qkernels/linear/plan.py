"""How one product of a weight and M rows runs: decided once, read by everything around it.

Norms and activations read `input`, the product reads `config`, warm-up and benches walk the plans.
Legend: M rows of x, N outputs, K inputs.
"""

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

from formats.scheme import ActivationSpec, QuantSpec
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.limbs import LimbForm, Limbs

InputForm = InputRounding | LimbForm | None  # None: a tensor as it is
LinearInput = torch.Tensor | Codes | Limbs


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """The kernel variant, its config, the form of its input and of its output."""

    variant: str
    config: object | None = None  # the variant's launch numbers; None: it has none to choose
    operand: InputForm = None  # what the kernel multiplies; `ops.linear` converts a plain tensor
    # what the operation before the product should make of its result: `operand`, or None where
    # it cannot (sorted inputs, scales for groups of inputs)
    input: InputForm = None
    output: Literal["sum", "split_k"] = "sum"  # split_k: the consumer reduces the partials
    rows: int | None = None  # the first ones, which this kernel takes, and `tail` the others
    tail: "GemmPlan | None" = None
    adds_adapters: bool = False  # the product takes a LoraTerm; else lora_expand_ comes behind it


def with_tensor(form: InputForm) -> InputForm:
    """What an operation makes where its result is read as a tensor, too."""
    return replace(form, with_tensor=True) if isinstance(form, LimbForm) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmProblem:
    """What a plan depends on besides M and the consumer. Equal weights share one object.

    Compared and hashed by identity, so that finding a plan costs one dictionary look-up.
    """

    kernel: str  # the row of qkernels.dispatch
    requested: str | None  # variants that were asked for or forbidden (choice.py)
    out_features: int
    in_features: int
    spec: QuantSpec
    activation: ActivationSpec | None
    rounding: InputRounding | None  # how x becomes codes; None: it does not
    sorts_inputs: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        return self.spec.group_length(self.in_features)


def gemm_problem(*, rounding: InputRounding | None, **fields: object) -> GemmProblem:
    """The problem with these fields. A static input scale belongs to one weight alone."""
    if rounding is not None and rounding.scale is not None:
        return GemmProblem(rounding=rounding, **fields)
    return _shared(rounding=rounding, **fields)


@functools.cache
def _shared(**fields: object) -> GemmProblem:
    return GemmProblem(**fields)


def plan_without_choice(problem: GemmProblem) -> GemmPlan:
    """The plan of a kernel that runs every M alike."""
    takes_codes = problem.activation is not None and problem.activation.per != "group"
    return GemmPlan(
        variant=problem.kernel,
        operand=problem.rounding,
        input=problem.rounding if takes_codes else None,
    )
