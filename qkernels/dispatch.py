"""Choice of a kernel for an operation from a table of rows, one per implementation, best first.

Each folder's `rows.py` lists the operations that it brings; a kernel is imported only when it is
chosen. The row of highest priority that supports the problem is chosen. A caller may request a row
by name or exclude some (choice.py). `explain` says for every row, and for each kernel variant of
the chosen row, why it runs or not.
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
    """One implementation of one operation.

    `module`, inside this package, has a function named like the operation. A module of `linear` has
    `prepare_weight` and `run`, and `plan` if it has a choice (linear/plan.py). It also has
    `dequantize` if it supports the gradient of x.
    """

    name: str
    module: str
    priority: int
    supports: Callable[[Problem], str | None]  # reason why not, or None if it is supported
    note: Callable[[Problem], str] | None = None  # remark of `explain` if it is supported, or ""
    variants: tuple[str, ...] = ()  # kernel variants of this row, chosen by M
    explain_variants: Callable[[Problem], list[tuple[str, str]]] | None = None

    def passed_over(self, problem: Problem) -> str | None:
        """Return why the caller's choice of kernels excludes this row; None: it does not."""
        return parse_choice(problem.requested).refuses(self.name, self.variants)


class Operation:
    """An operation and its rows, best first. It is compared by identity."""

    def __init__(self, name: str, *kernels: Kernel) -> None:
        self.name = name
        self.kernels = tuple(sorted(kernels, key=lambda row: -row.priority))

    def __repr__(self) -> str:
        return f"Operation({self.name!r})"


def triton_or_reference(
    folder: str, name: str, module: str, refuses: Callable[[Problem], str | None]
) -> Operation:
    """Make an operation with a triton row, and below it the folder's plain torch reference."""
    return Operation(
        name,
        Kernel(name="triton", module=f"{folder}.{module}", priority=20, supports=refuses),
        reference(folder),
    )


def reference(folder: str) -> Kernel:
    """Make the row of a folder's plain torch reference."""
    return Kernel(name="reference", module=f"{folder}.reference", priority=10, supports=anything)


class Choice(NamedTuple):
    """One line of an explanation: a row or a variant, whether it is chosen, and why."""

    name: str
    taken: bool
    reason: str


class Explanation(list[Choice]):
    """List of choices, best first, which prints one line each."""

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
    """Explain for every row whether it is chosen, and why. `problem`: the fields of Problem."""
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
    """Return the row to run. Raises KernelError if the caller's choice leaves none that can."""
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
            f"operation {operation.name!r}", f"no other kernel supports it: {never} was forbidden"
        )
    reasons = [f"{name} {reason}" for reason, name in refused.items()]
    text = next(iter(refused)) if len(refused) == 1 else "; ".join(reasons)
    raise KernelError(f"kernel {choice.only!r}", text, "do not request a kernel by name")


@functools.lru_cache(maxsize=4096)
def implementation(operation: Operation, **problem: object) -> Callable[..., object]:
    """Import and return the function to run. `problem`: the fields of Problem."""
    return getattr(_import(choose(operation, Problem(**problem))), operation.name)


@functools.cache
def module_of(operation: Operation, name: str) -> ModuleType:
    """Import the module of one row."""
    return _import(next(row for row in operation.kernels if row.name == name))


def _import(row: Kernel) -> ModuleType:
    return importlib.import_module(f"qkernels.{row.module}")
