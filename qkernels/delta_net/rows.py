"""Operations of a gated delta net, and the kernels that do them."""

from qkernels.dispatch import Kernel, Operation, reference, triton_or_reference
from qkernels.problem import Problem, anything, needs_triton_on_gpu

MAX_DIM = 256  # a column block of a head's state lies in one program's registers


def triton_delta(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and max(problem.in_features, problem.head_dim) > MAX_DIM:
        return f"takes heads of up to {MAX_DIM}, not {problem.in_features} x {problem.head_dim}"
    return reason


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
)
GATED_RMS_NORM = triton_or_reference("delta_net", "gated_rms_norm", "triton_norm", triton_delta)
OPERATIONS = (DELTA_RULE, GATED_RMS_NORM)
