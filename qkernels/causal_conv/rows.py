"""Dispatch table of the causal convolutions."""

from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel, Operation, reference, triton_or_reference
from qkernels.problem import (
    Problem,
    anything,
    fixed_order,
    needs_triton,
    needs_triton_on_gpu,
)


def in_fixed_order(problem: Problem) -> str | None:
    return fixed_order(problem, needs_triton_on_gpu)


_TRITON = Kernel(
    name="triton", module="causal_conv.triton_conv", priority=20, supports=needs_triton_on_gpu
)
_BATCHED = Kernel(name="batched", module="causal_conv.batched", priority=15, supports=anything)
_FIXED_ORDER = Kernel(
    name=FIXED_ORDER, module="causal_conv.fixed_order", priority=5, supports=in_fixed_order
)
CAUSAL_CONV = Operation("causal_conv_", _TRITON, _BATCHED, reference("causal_conv"), _FIXED_ORDER)
SHORT_CONV = Operation("short_conv_", _TRITON, _BATCHED, reference("causal_conv"), _FIXED_ORDER)
LACKING_ROWS = triton_or_reference("causal_conv", "lacking_rows_", "triton_lacking", needs_triton)
OPERATIONS = (CAUSAL_CONV, SHORT_CONV, LACKING_ROWS)
