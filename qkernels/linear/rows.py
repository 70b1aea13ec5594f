"""Dispatch table of the quantized linear, with the kernels of all weight formats."""

from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel, Operation, reference
from qkernels.problem import Problem
from qkernels.w4a8 import rows as w4a8
from qkernels.w8a8 import rows as w8a8
from qkernels.wna16 import rows as wna16


def dense(problem: Problem) -> str | None:
    if problem.activation is not None:
        return "takes 16- or 32-bit activations, not 8-bit ones"
    if problem.device != "cpu" and problem.requested is None:
        return "holds the weight unpacked; on a GPU it must be requested by name"
    return None


def fixed_order(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"computes each row alone on a cpu, not on {problem.device}"
    return None if problem.requested == FIXED_ORDER else "runs only if requested by name"


LINEAR = Operation(
    "linear",
    *wna16.KERNELS,
    *w8a8.KERNELS,
    *w4a8.KERNELS,
    Kernel(name=FIXED_ORDER, module="linear.fixed_order", priority=22, supports=fixed_order),
    Kernel(name="dense", module="linear.dense", priority=20, supports=dense),
    reference("linear"),
)
OPERATIONS = (LINEAR,)
