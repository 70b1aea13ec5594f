"""Dispatch: choose a kernel for an operation from a table with one row per implementation.

Each folder's `rows.py` lists its operations. The row of highest priority that supports the problem
runs; its module is imported only then. A caller may request a row by name or exclude rows
(choice.py). `explain` reports for every row, and for each kernel variant of the chosen row, why it
runs or does not run.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from qkernels.choice import parse_choice
from qkernels.errors import KernelError
from qkernels.problem import Problem, anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One implementation of one operation: a row of the table.

    `module`, inside this package, has a function with the operation's name. A module of `linear`
    has `prepare_weight` and `run` instead, `plan` if it has several variants (linear/plan.py), and
    `dequantize` if it supports the gradient of x.
    """

    name: str
    module: str
    priority: int
    supports: Callable[[Problem], str | None]  # why the problem is not supported; None: it is
    note: Callable[[Problem], str] | None = None  # what `explain` adds to a supported row, or ""
    variants: tuple[str, ...] = ()  # kernel variants of this row, chosen by M
    explain_variants: Callable[[Problem], list[tuple[str, str]]] | None = None

    def passed_over(self, problem: Problem) -> str | None:
        """Return why the caller's choice excludes this row; None: it may run."""
        return parse_choice(problem.requested).refuses(self.name, self.variants)


class Operation:
    """An operation and its rows, best first. Operations compare by identity."""

    def __init__(self, name: str, *kernels: Kernel) -> None:
        self.name = name
        self.kernels = tuple(sorted(kernels, key=lambda row: -row.priority))

    def __repr__(self) -> str:
        return f"Operation({self.name!r})"


def triton_or_reference(
    folder: str, name: str, module: str, refuses: Callable[[Problem], str | None]
) -> Operation:
    """Make an operation with a `triton` row and, below it, the folder's plain torch reference."""
    return Operation(
        name,
        Kernel(name="triton", module=f"{folder}.{module}", priority=20, supports=refuses),
        reference(folder),
    )


def reference(folder: str) -> Kernel:
    """Make the row of a folder's plain torch reference."""
    return Kernel(name="reference", module=f"{folder}.reference", priority=10, supports=anything)


class Choice(NamedTuple):
    """One line of an explanation: the name of a row or variant, whether it runs, and why."""

    name: str
    taken: bool
    reason: str


class Explanation(list[Choice]):
    """Choices for all rows of an operation, best first. Prints as one line each."""

    def __init__(self) -> None:
        super().__init__()
        self.variants: list[Choice] = []  # variants of the chosen row

    def __str__(self) -> str:
        lines = []
        for choice in self:
            lines.append(f"{'->' if choice.taken else '  '} {choice.name}: {choice.reason}")
            if choice.taken:
                lines += [f"     {each.name}: {each.reason}" for each in self.variants]
        return "\n".join(lines)

    __repr__ = __str__


def explain(operation: Operation, **problem: object) -> Explanation:
    """Explain for every row whether it is chosen, and why.

    `problem` holds fields of Problem.
    """
    asked = Problem(**problem)
    explanation = Explanation()
    taken = False
    for row in operation.kernels:
        reason = row.supports(asked) or row.passed_over(asked)
        if reason is None and taken:
            reason = "supported, but a row above is preferred"
        if reason is not None:
            explanation.append(Choice(row.name, False, reason))
            continue
        taken = True
        note = row.note(asked) if row.note is not None else ""
        explanation.append(Choice(row.name, True, f"supported; {note}" if note else "supported"))
        if row.explain_variants is not None:
            explanation.variants = [
                Choice(name, False, why) for name, why in row.explain_variants(asked)
            ]
    return explanation


@functools.lru_cache(maxsize=4096)
def choose(operation: Operation, problem: Problem) -> Kernel:
    """Return the row to run.

    Raises KernelError if the caller's choice leaves no row that supports it.
    """
    candidates = operation.kernels
    choice = parse_choice(problem.requested)
    known = {name for row in candidates for name in (row.name, *row.variants)}
    unknown = sorted(choice.names - known)
    if unknown:
        names = ", ".join(dict.fromkeys(n for row in candidates for n in (row.name, *row.variants)))
        raise KernelError(
            f"kernel {unknown[0]!r}", f"unknown to {operation.name}", f"known: {names}"
        )
    refused: dict[str, str] = {}  # reason -> the first row with this reason
    for row in candidates:
        if row.passed_over(problem) is None:
            reason = row.supports(problem)
            if reason is None:
                return row
            refused.setdefault(reason, row.name)
    if choice.only is None or not refused:
        never = ", ".join(sorted(choice.never))
        raise KernelError(
            f"operation {operation.name!r}",
            f"is supported by no kernel except the excluded {never}",
            "exclude fewer kernels",
        )
    reasons = [f"{name} {reason}" for reason, name in refused.items()]
    text = next(iter(refused)) if len(refused) == 1 else "; ".join(reasons)
    raise KernelError(f"kernel {choice.only!r}", text, "do not request a kernel by name")


@functools.lru_cache(maxsize=4096)
def implementation(operation: Operation, **problem: object) -> Callable[..., object]:
    """Import and return the function that runs a problem.

    `problem` holds fields of Problem.
    """
    return getattr(_import(choose(operation, Problem(**problem))), operation.name)


@functools.cache
def module_of(operation: Operation, name: str) -> ModuleType:
    """Import the module of one row."""
    return _import(next(row for row in operation.kernels if row.name == name))


def _import(row: Kernel) -> ModuleType:
    return importlib.import_module(f"qkernels.{row.module}")
