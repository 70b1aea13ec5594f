"""Which kernel does an operation: one table of rows. Imports a kernel only when it is chosen.

Of the rows of an operation that support the problem, the one of highest priority is taken. A caller
may ask for one by name, or forbid some (choice.py). `explain` says for every row, and for each
kernel variant of the row that is taken, why it runs or not.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from qkernels import problem
from qkernels.attention import supports as attention
from qkernels.choice import parse_choice
from qkernels.delta_net import supports as delta_net
from qkernels.errors import KernelError
from qkernels.linear import supports as linear
from qkernels.moe import supports as moe
from qkernels.moe.variants import NAMES as MOE_NAMES
from qkernels.problem import Problem
from qkernels.rowwise import supports as rowwise
from qkernels.w8a8 import supports as w8a8
from qkernels.w8a8.config import W8A8Sm90Config, W8A8TritonConfig
from qkernels.wna16 import supports as wna16
from qkernels.wna16.variants import NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One way to do one operation.

    `module`, inside this package, has a function named like the operation. A module of `linear` has
    `prepare_weight` and `run`, and `plan` where it has a choice (linear/plan.py); one that x's
    gradient can pass has `dequantize`, too.
    """

    op: str
    name: str
    module: str
    priority: int
    supports: Callable[[Problem], str | None]  # None, or why not
    note: Callable[[Problem], str] | None = None  # what `explain` adds where it is supported, or ""
    variants: tuple[str, ...] = ()  # kernels of this row, which choose among each other by M
    explain_variants: Callable[[Problem], list[tuple[str, str]]] | None = None

    def passed_over(self, problem: Problem) -> str | None:
        """Why the caller's choice of kernels excludes this row; None: it does not."""
        return parse_choice(problem.requested).refuses(self.name, self.variants)


class Choice(NamedTuple):
    """One line of an explanation: a row or a variant, whether it is taken, and why."""

    name: str
    taken: bool
    reason: str


class Explanation(list[Choice]):
    """A list of choices, best first, that prints as one line each."""

    def __init__(self) -> None:
        super().__init__()
        self.variants: list[Choice] = []  # of the row that is taken

    def __str__(self) -> str:
        lines = []
        for choice in self:
            lines.append(f"{'->' if choice.taken else '  '} {choice.name}: {choice.reason}")
            if choice.taken:
                lines += [f"     {each.name}: {each.reason}" for each in self.variants]
        return "\n".join(lines)

    __repr__ = __str__


def _rows(
    folder: str, op: str, module: str, refuses: Callable[[Problem], str | None]
) -> tuple[Kernel, ...]:
    """An operation's triton row, and under it that of its folder's plain torch reference."""
    return (
        Kernel(op=op, name="triton", module=f"{folder}.{module}", priority=20, supports=refuses),
        Kernel(
            op=op,
            name="reference",
            module=f"{folder}.reference",
            priority=10,
            supports=problem.anything,
        ),
    )


KERNELS: tuple[Kernel, ...] = (
    *(
        Kernel(
            op="linear",
            name=f"w{bits}a16",
            module="wna16.gemm",
            priority=30,
            supports=functools.partial(wna16.triton_weight_only, bits=bits),
            variants=NAMES,
            explain_variants=wna16.explain_variants,
        )
        for bits in (4, 8)
    ),
    Kernel(
        op="linear",
        name="sm90_w8a8",
        module="w8a8.sm90",
        priority=30,
        supports=w8a8.sm90_w8a8,
        note=functools.partial(w8a8.note_measured, config=W8A8Sm90Config),
        variants=("sm90",),
    ),
    Kernel(
        op="linear",
        name="triton_w8a8",
        module="w8a8.triton_gemm",
        priority=30,
        supports=w8a8.triton_w8a8,
        note=functools.partial(w8a8.note_measured, config=W8A8TritonConfig),
        variants=("triton",),
    ),
    *(
        Kernel(
            op="linear",
            name=f"cpu_w{bits}a16",
            module="wna16.cpu",
            priority=25,
            supports=functools.partial(wna16.cpu_weight_only, bits=bits),
            variants=("cpu",),
        )
        for bits in (4, 8)
    ),
    Kernel(
        op="linear",
        name="cpu_w8a8",
        module="w8a8.cpu",
        priority=25,
        supports=w8a8.cpu_w8a8,
        variants=("cpu",),
    ),
    Kernel(
        op="linear",
        name="dense",
        module="linear.dense",
        priority=20,
        supports=linear.dense,
    ),
    Kernel(
        op="linear",
        name="reference",
        module="linear.reference",
        priority=10,
        supports=problem.anything,
    ),
    Kernel(
        op="paged_attention",
        name="sm90_prefill",
        module="attention.sm90_prefill",
        priority=30,
        supports=attention.sm90_prefill,
    ),
    *_rows("attention", "paged_attention", "triton_paged", attention.triton_attention),
    *_rows("attention", "apply_rope", "rope", problem.needs_triton_on_gpu),
    *_rows("attention", "write_kv_", "rope_write_kv", attention.triton_kv_write),
    *_rows("attention", "rope_write_kv_", "rope_write_kv", attention.triton_kv_write),
    *_rows("rowwise", "quantize_input", "quantize", rowwise.triton_quantize),
    *_rows("rowwise", "quantize_input_asymmetric", "quantize", rowwise.triton_quantize_asymmetric),
    *_rows("rowwise", "rms_norm_quantize", "norm_act_quantize", rowwise.triton_norm_quantize),
    *_rows("rowwise", "add_rms_norm_quantize", "norm_act_quantize", rowwise.triton_norm_quantize),
    *_rows("rowwise", "silu_and_mul_quantize", "norm_act_quantize", rowwise.triton_silu_quantize),
    *_rows("rowwise", "gelu_and_mul_quantize", "norm_act_quantize", rowwise.triton_silu_quantize),
    *_rows("rowwise", "to_limbs", "limbs", rowwise.triton_limbs),
    *_rows("rowwise", "rms_norm_limbs", "norm_act_limbs", rowwise.triton_limbs),
    *_rows("rowwise", "embed_norms_limbs", "embed_norms", rowwise.triton_limbs),
    *_rows("rowwise", "embed_norms", "embed_norms", problem.needs_triton_on_gpu),
    *_rows("rowwise", "add_rms_norm_limbs", "norm_act_limbs", rowwise.triton_limbs),
    *_rows("rowwise", "silu_and_mul_limbs", "norm_act_limbs", rowwise.triton_limbs),
    *_rows("rowwise", "gelu_and_mul_limbs", "norm_act_limbs", rowwise.triton_limbs),
    *_rows("rowwise", "rms_norm", "norm_act", problem.needs_triton_on_gpu),
    *_rows("rowwise", "add_rms_norm", "norm_act", problem.needs_triton_on_gpu),
    *_rows("rowwise", "silu_and_mul", "norm_act", problem.needs_triton_on_gpu),
    *_rows("rowwise", "gelu_and_mul", "norm_act", problem.needs_triton_on_gpu),
    *_rows("moe", "route", "triton_route", problem.needs_triton_on_gpu),
    *_rows("moe", "route_tokens", "triton_route", problem.needs_triton_on_gpu),
    Kernel(
        op="experts",
        name="triton",
        module="moe.triton_experts",
        priority=20,
        supports=moe.triton_experts,
        variants=MOE_NAMES,
        explain_variants=moe.explain_variants,
    ),
    Kernel(
        op="experts",
        name="reference",
        module="moe.reference",
        priority=10,
        supports=problem.anything,
    ),
    *_rows("lora", "lora_shrink", "triton_lora", problem.needs_triton_on_gpu),
    *_rows("lora", "lora_shrink_parts", "triton_lora", problem.needs_triton_on_gpu),
    *_rows("lora", "lora_expand_", "triton_lora", problem.needs_triton_on_gpu),
    *_rows("delta_net", "causal_conv_", "triton_conv", problem.needs_triton_on_gpu),
    *_rows("delta_net", "delta_rule_", "triton_delta", delta_net.triton_delta),
    *_rows("delta_net", "gated_rms_norm", "triton_norm", delta_net.triton_delta),
    *(
        Kernel(
            op=op,
            name="chunked",
            module="delta_net.chunked",
            priority=15,
            supports=problem.anything,
        )
        for op in ("causal_conv_", "delta_rule_")
    ),
    *_rows("sampling", "sample_", "triton_sample", problem.needs_triton_on_gpu),
    *_rows("drafts", "fill_drafts_", "triton_fill", problem.needs_triton),
    *_rows("drafts", "spread_logits", "triton_spread", problem.needs_triton_on_gpu),
    *_rows("drafts", "settle_drafts_", "triton_settle", problem.needs_triton),
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
def choose(op: str, problem: Problem) -> Kernel:
    """The row that does `op`. Raises KernelError where the caller's choice leaves none that can."""
    candidates = rows(op)
    choice = parse_choice(problem.requested)
    known = {name for row in candidates for name in (row.name, *row.variants)}
    unknown = sorted(choice.names - known)
    if unknown:
        names = ", ".join(dict.fromkeys(n for row in candidates for n in (row.name, *row.variants)))
        raise KernelError(f"kernel {unknown[0]!r}", f"unknown to {op}", f"known: {names}")
    refused: dict[str, str] = {}  # reason -> the first row that gives it
    for row in candidates:
        if row.passed_over(problem) is None:
            reason = row.supports(problem)
            if reason is None:
                return row
            refused.setdefault(reason, row.name)
    if choice.only is None or not refused:
        never = ", ".join(sorted(choice.never))
        raise KernelError(f"operation {op!r}", f"nothing else can do it: {never} was forbidden")
    reasons = [f"{name} {reason}" for reason, name in refused.items()]
    text = next(iter(refused)) if len(refused) == 1 else "; ".join(reasons)
    raise KernelError(f"kernel {choice.only!r}", text, "ask for no kernel by name")


@functools.lru_cache(maxsize=4096)
def implementation(op: str, **problem: object) -> Callable[..., object]:
    """The function that does `op`, imported. `problem`: the fields of Problem."""
    return getattr(_import(choose(op, Problem(**problem))), op)


def linear_module(name: str) -> ModuleType:
    """The module of one row of `linear` (see Kernel)."""
    return module_of("linear", name)


@functools.cache
def module_of(op: str, name: str) -> ModuleType:
    """The module of one row of an operation."""
    return _import(next(row for row in rows(op) if row.name == name))


def _import(row: Kernel) -> ModuleType:
    return importlib.import_module(f"qkernels.{row.module}")
