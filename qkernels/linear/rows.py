"""Dispatch table of the quantized linear, with the kernels of all folders."""

from qkernels.dispatch import Kernel, Operation, reference
from qkernels.problem import Problem
from qkernels.w8a8 import rows as w8a8
from qkernels.wna16 import rows as wna16


def dense(problem: Problem) -> str | None:
    if problem.activation is not None:
        return "takes 16- or 32-bit activations, not 8-bit ones"
    if problem.device != "cpu" and problem.requested is None:
        return "holds the weight unpacked; on a GPU it must be requested by name"
    return None


LINEAR = Operation(
    "linear",
    *wna16.KERNELS,
    *w8a8.KERNELS,
    Kernel(name="dense", module="linear.dense", priority=20, supports=dense),
    reference("linear"),
)
OPERATIONS = (LINEAR,)
