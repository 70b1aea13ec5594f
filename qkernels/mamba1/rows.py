"""Dispatch table of Mamba-1."""

from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel, Operation, reference
from qkernels.problem import Problem, anything, fixed_order, needs_triton_on_gpu

MAX_STATE = 256  # a program holds the states of some channels in registers


def triton_scan(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and problem.in_features > MAX_STATE:
        return f"takes states of up to {MAX_STATE}, not {problem.in_features}"
    return reason


CHANNEL_SCAN = Operation(
    "channel_scan_",
    Kernel(name="triton", module="mamba1.triton_scan", priority=20, supports=triton_scan),
    Kernel(name="together", module="mamba1.together", priority=15, supports=anything),
    reference("mamba1"),
    Kernel(
        name=FIXED_ORDER,
        module="mamba1.fixed_order",
        priority=5,
        supports=lambda problem: fixed_order(problem, triton_scan),
    ),
)
OPERATIONS = (CHANNEL_SCAN,)
