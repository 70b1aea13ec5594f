"""Dispatch table of the LoRA operations."""

from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel, Operation, reference, triton_or_reference
from qkernels.problem import Problem, fixed_order, needs_triton_on_gpu


def in_fixed_order(problem: Problem) -> str | None:
    return fixed_order(problem, needs_triton_on_gpu)


def _operation(name: str) -> Operation:
    """Make an operation with Triton, reference and fixed-order rows."""
    return Operation(
        name,
        Kernel(name="triton", module="lora.triton_lora", priority=20, supports=needs_triton_on_gpu),
        reference("lora"),
        Kernel(name=FIXED_ORDER, module="lora.fixed_order", priority=5, supports=in_fixed_order),
    )


SHRINK = _operation("lora_shrink")
SHRINK_PARTS = triton_or_reference("lora", "lora_shrink_parts", "triton_lora", needs_triton_on_gpu)
EXPAND = _operation("lora_expand_")
OPERATIONS = (SHRINK, SHRINK_PARTS, EXPAND)
