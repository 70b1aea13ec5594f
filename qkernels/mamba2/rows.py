"""Dispatch table of Mamba-2."""

from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel, Operation, reference
from qkernels.problem import Problem, anything, fixed_order, needs_triton_on_gpu

MAX_DIM = 256  # a program holds a column block of a head's state in registers
MAX_GROUP = 16384  # a program holds a group's channels in registers


def triton_scan(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and max(problem.in_features, problem.head_dim) > MAX_DIM:
        return f"takes states of up to {MAX_DIM}, not {problem.in_features} x {problem.head_dim}"
    return reason


def triton_norm(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and problem.in_features > MAX_GROUP:
        return f"takes groups of up to {MAX_GROUP} channels, not {problem.in_features}"
    return reason


SELECTIVE_SCAN = Operation(
    "selective_scan_",
    Kernel(name="triton", module="mamba2.triton_scan", priority=20, supports=triton_scan),
    Kernel(name="chunked", module="mamba2.chunked", priority=15, supports=anything),
    reference("mamba2"),
    Kernel(
        name=FIXED_ORDER,
        module="mamba2.fixed_order",
        priority=5,
        supports=lambda problem: fixed_order(problem, triton_scan),
    ),
)
GATED_GROUP_NORM = Operation(
    "gated_group_norm",
    Kernel(name="triton", module="mamba2.triton_norm", priority=20, supports=triton_norm),
    reference("mamba2"),
    Kernel(
        name=FIXED_ORDER,
        module="mamba2.fixed_order",
        priority=5,
        supports=lambda problem: fixed_order(problem, triton_norm),
    ),
)
OPERATIONS = (SELECTIVE_SCAN, GATED_GROUP_NORM)
