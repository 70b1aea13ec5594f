"""Plan of one product of a weight and M rows, made once and read by all operations around it.

Norms and activations read `input`, the product reads `config`, warm-up and benches walk the plans.
Legend: M rows of x, N outputs, K inputs.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from formats.scheme import ActivationSpec, QuantSpec
from qkernels.operands.codes import InputRounding
from qkernels.operands.forms import InputForm


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """Kernel variant, its config, and the forms of its input and output."""

    variant: str
    config: object | None = None  # the variant's launch config; None: it has no choices
    operand: InputForm = None  # what the kernel multiplies; `ops.linear` converts tensors to it
    # form that the operation before the product should produce: `operand`, or None if it cannot
    # (sorted inputs, scales for groups of inputs)
    input: InputForm = None
    output: Literal["sum", "split_k"] = "sum"  # split_k: the consumer reduces the partials
    rows: int | None = None  # the first rows run in this kernel, the tail rows in `tail`
    tail: "GemmPlan | None" = None
    adds_adapters: bool = False  # the product takes a LoraTerm; else lora_expand_ runs after it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmProblem:
    """Key of plans, apart from M and the consumer. Equal weights share one object.

    It is compared and hashed by identity, so that a plan is found by one dictionary look-up.
    """

    kernel: str  # the row of linear/rows.py
    requested: str | None  # variants that were requested or excluded (choice.py)
    out_features: int
    in_features: int
    spec: QuantSpec
    activation: ActivationSpec | None
    rounding: InputRounding | None  # rounding of x to codes; None: x stays float
    sorts_inputs: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        return self.spec.group_length(self.in_features)


def gemm_problem(*, rounding: InputRounding | None, **fields: object) -> GemmProblem:
    """Return the shared problem with these fields."""
    if rounding is not None and rounding.scale is not None:
        return GemmProblem(rounding=rounding, **fields)
    return _shared(rounding=rounding, **fields)


@functools.cache
def _shared(**fields: object) -> GemmProblem:
    return GemmProblem(**fields)


def plan_without_choice(problem: GemmProblem) -> GemmPlan:
    """Return the plan of a kernel that runs every M in the same way."""
    takes_codes = problem.activation is not None and problem.activation.per != "group"
    return GemmPlan(
        variant=problem.kernel,
        operand=problem.rounding,
        input=problem.rounding if takes_codes else None,
    )
