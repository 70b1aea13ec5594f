"""Dispatch table of the gated delta net."""

from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel, Operation, reference
from qkernels.problem import Problem, anything, fixed_order, needs_triton_on_gpu

MAX_DIM = 256  # a program holds a column block of a head's state in registers


def triton_delta(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and max(problem.in_features, problem.head_dim) > MAX_DIM:
        return f"takes heads of up to {MAX_DIM}, not {problem.in_features} x {problem.head_dim}"
    return reason


def in_fixed_order(problem: Problem) -> str | None:
    return fixed_order(problem, triton_delta)


_FIXED_ORDER = Kernel(
    name=FIXED_ORDER, module="delta_net.fixed_order", priority=5, supports=in_fixed_order
)
DELTA_RULE = Operation(
    "delta_rule_",
    Kernel(
        name="triton",
        module="delta_net.triton_delta",
        priority=20,
        supports=triton_delta,
    ),
    Kernel(name="chunked", module="delta_net.chunked", priority=15, supports=anything),
    reference("delta_net"),
    _FIXED_ORDER,
)
GATED_RMS_NORM = Operation(
    "gated_rms_norm",
    Kernel(name="triton", module="delta_net.triton_norm", priority=20, supports=triton_delta),
    reference("delta_net"),
    _FIXED_ORDER,
)
OPERATIONS = (DELTA_RULE, GATED_RMS_NORM)
