"""Which kernel does an operation: one table of rows. Imports a kernel only when it is chosen.

Of the rows of an operation that support the problem, the one of highest priority is taken.
`explain` says for every row why it is taken or not.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from qkernels import supports
from qkernels.errors import KernelError
from qkernels.int8_tiles import Int8HopperTile, Int8Tile
from qkernels.supports import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One way to do one operation. `module` has a function named like the operation."""

    op: str
    name: str
    module: str
    priority: int
    supports: Callable[[Problem], str | None]  # None, or why not
    note: Callable[[Problem], str] | None = None  # what `explain` adds where it is supported, or ""


class Choice(NamedTuple):
    name: str
    taken: bool
    reason: str


class Explanation(list[Choice]):
    """A list of choices, best first, that prints as one line each."""

    def __str__(self) -> str:
        return "\n".join(
            f"{'->' if choice.taken else '  '} {choice.name}: {choice.reason}" for choice in self
        )

    __repr__ = __str__


def _rows(
    op: str,
    module: str,
    refuses: Callable[[Problem], str | None],
    reference: str = "qkernels.reference",
) -> tuple[Kernel, ...]:
    """A triton row and the plain torch row under it."""
    return (
        Kernel(op=op, name="triton", module=module, priority=20, supports=refuses),
        Kernel(
            op=op,
            name="reference",
            module=reference,
            priority=10,
            supports=supports.anything,
        ),
    )


KERNELS: tuple[Kernel, ...] = (
    *(
        Kernel(
            op="linear",
            name=f"triton_w{bits}a16",
            module="qkernels.w4a16",
            priority=30,
            supports=functools.partial(supports.triton_weight_only, bits=bits),
            note=supports.note_weight_only,
        )
        for bits in (4, 8)
    ),
    Kernel(
        op="linear",
        name="hopper_w8a8",
        module="qkernels.w8a8_hopper",
        priority=30,
        supports=supports.hopper_w8a8,
        note=functools.partial(supports.note_int8, tile=Int8HopperTile),
    ),
    Kernel(
        op="linear",
        name="triton_w8a8",
        module="qkernels.w8a8",
        priority=30,
        supports=supports.triton_w8a8,
        note=functools.partial(supports.note_int8, tile=Int8Tile),
    ),
    *(
        Kernel(
            op="linear",
            name=f"cpu_w{bits}a16",
            module="qkernels.cpu_w4a16",
            priority=25,
            supports=functools.partial(supports.cpu_weight_only, bits=bits),
        )
        for bits in (4, 8)
    ),
    Kernel(
        op="linear",
        name="cpu_w8a8",
        module="qkernels.cpu_w8a8",
        priority=25,
        supports=supports.cpu_w8a8,
    ),
    Kernel(
        op="linear",
        name="dense",
        module="qkernels.dense",
        priority=20,
        supports=supports.dense,
    ),
    Kernel(
        op="linear",
        name="reference",
        module="qkernels.reference",
        priority=10,
        supports=supports.anything,
    ),
    Kernel(
        op="paged_attention",
        name="triton_hopper",
        module="qkernels.attention_hopper",
        priority=30,
        supports=supports.hopper_attention,
    ),
    *_rows("paged_attention", "qkernels.paged_attention", supports.triton_attention),
    *_rows("quantize_input", "qkernels.act_quant", supports.triton_quantize),
    *_rows("quantize_input_asymmetric", "qkernels.act_quant", supports.triton_quantize_asymmetric),
    *_rows("rms_norm_quantize", "qkernels.fused_quant", supports.triton_norm_quantize),
    *_rows("add_rms_norm_quantize", "qkernels.fused_quant", supports.triton_norm_quantize),
    *_rows("silu_and_mul_quantize", "qkernels.fused_quant", supports.triton_silu_quantize),
    *_rows("input_digits", "qkernels.input_digits", supports.triton_digits),
    *_rows("rms_norm_digits", "qkernels.fused_digits", supports.triton_digits),
    *_rows("add_rms_norm_digits", "qkernels.fused_digits", supports.triton_digits),
    *_rows("silu_and_mul_digits", "qkernels.fused_digits", supports.triton_digits),
    *_rows("rms_norm", "qkernels.elementwise", supports.needs_triton_on_gpu),
    *_rows("add_rms_norm", "qkernels.elementwise", supports.needs_triton_on_gpu),
    *_rows("silu_and_mul", "qkernels.elementwise", supports.needs_triton_on_gpu),
    *_rows("apply_rope", "qkernels.elementwise", supports.needs_triton_on_gpu),
    *_rows("write_kv_", "qkernels.kv_cache", supports.triton_kv_write),
    *_rows("rope_write_kv_", "qkernels.kv_cache", supports.triton_kv_write),
    *_rows(
        "sample_", "qkernels.sampling", supports.needs_triton_on_gpu, "qkernels.reference_sampling"
    ),
)


def rows(op: str) -> list[Kernel]:
    """The rows of `op`, best first. Raises KernelError for an unknown operation."""
    found = sorted((row for row in KERNELS if row.op == op), key=lambda row: -row.priority)
    if not found:
        known = ", ".join(dict.fromkeys(row.op for row in KERNELS))
        raise KernelError(f"operation {op!r}", "unknown", f"known operations: {known}")
    return found


def explain(op: str, **problem: object) -> Explanation:
    """Say of every row of `op` whether it is taken, and why. `problem`: the fields of Problem."""
    asked = Problem(**problem)
    explanation = Explanation()
    taken = False
    for row in rows(op):
        reason = row.supports(asked)
        if reason is None and asked.requested not in (None, row.name):
            reason = f"{asked.requested} was asked for"
        if reason is None and taken:
            reason = "supported, but a row above is preferred"
            explanation.append(Choice(row.name, False, reason))
            continue
        taken = taken or reason is None
        if reason is None:
            note = "" if row.note is None else row.note(asked)
            explanation.append(
                Choice(row.name, True, f"supported; {note}" if note else "supported")
            )
        else:
            explanation.append(Choice(row.name, False, reason))
    return explanation


@functools.lru_cache(maxsize=4096)
def choose(op: str, problem: Problem) -> Kernel:
    """The row that does `op`. Raises KernelError where a kernel asked for by name cannot."""
    candidates = rows(op)
    if problem.requested is None:
        return next(row for row in candidates if row.supports(problem) is None)
    for row in candidates:
        if row.name == problem.requested:
            reason = row.supports(problem)
            if reason is not None:
                raise KernelError(f"kernel {row.name!r}", reason, "ask for no kernel by name")
            return row
    names = ", ".join(row.name for row in candidates)
    raise KernelError(f"kernel {problem.requested!r}", f"unknown to {op}", f"known: {names}")


@functools.lru_cache(maxsize=4096)
def implementation(op: str, **problem: object) -> Callable[..., object]:
    """The function that does `op`, imported. `problem`: the fields of Problem."""
    return getattr(importlib.import_module(choose(op, Problem(**problem)).module), op)


@functools.cache
def linear_module(name: str) -> object:
    """The module of one row of `linear`: it has `prepare_weight` and `linear`."""
    row = next(row for row in rows("linear") if row.name == name)
    return importlib.import_module(row.module)
