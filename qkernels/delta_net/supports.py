"""Why a row of dispatch.py cannot run a gated delta net; None: it can."""

from qkernels.problem import Problem, needs_triton_on_gpu

MAX_DIM = 256  # a column block of a head's state lies in one program's registers


def triton_delta(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and max(problem.in_features, problem.head_dim) > MAX_DIM:
        return f"takes heads of up to {MAX_DIM}, not {problem.in_features} x {problem.head_dim}"
    return reason
