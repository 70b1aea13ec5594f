"""Plan of one product of a weight and M rows, made once and read by all operations around it.

Norms and activations read `input`, the product reads `config`, warm-up and benchmarks enumerate
plans. Legend: M rows of x, N outputs, K inputs.
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
    """Kernel variant of one product, its config, and the forms of its input and output."""

    variant: str
    config: object | None = None  # the variant's launch config; None: nothing to configure
    operand: InputForm = None  # form that the kernel multiplies; `ops.linear` converts tensors
    # Form that the operation before the product should produce: `operand`, or None if that
    # operation cannot (sorted inputs, one scale per group of inputs).
    input: InputForm = None
    output: Literal["sum", "split_k"] = "sum"  # split_k: the consumer adds the partial sums
    rows: int | None = None  # this kernel runs the first `rows` rows; `tail` runs the tail rows
    tail: "GemmPlan | None" = None
    adds_adapters: bool = False  # the product takes a LoraTerm; else lora_expand_ runs after it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmProblem:
    """Cache key of a plan, apart from M and the consumer. Equal weights share one object.

    Problems compare and hash by identity, so that finding a plan is one dictionary look-up.
    """

    kernel: str  # the row of linear/rows.py
    requested: str | None  # variants that were requested or excluded (choice.py)
    out_features: int
    in_features: int
    spec: QuantSpec
    activation: ActivationSpec | None
    rounding: InputRounding | None  # how x is rounded to codes; None: x stays float
    sorts_inputs: bool
    in_multiples: bool  # scales of a row are integers times one number (w4a8/sm90.py)
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        return self.spec.group_length(self.in_features)


def gemm_problem(*, rounding: InputRounding | None, **fields: object) -> GemmProblem:
    """Return the shared problem with these fields; one with a static scale is not shared."""
    if rounding is not None and rounding.scale is not None:
        return GemmProblem(rounding=rounding, **fields)
    return _shared(rounding=rounding, **fields)


@functools.cache
def _shared(**fields: object) -> GemmProblem:
    return GemmProblem(**fields)


def plan_without_choice(problem: GemmProblem) -> GemmPlan:
    """Return the plan of a kernel that runs every M the same way."""
    takes_codes = problem.activation is not None and problem.activation.per != "group"
    return GemmPlan(
        variant=problem.kernel,
        operand=problem.rounding,
        input=problem.rounding if takes_codes else None,
    )
