"""Why the rows of dispatch.py that dequantize cannot do a problem; None: they can."""

from qkernels.problem import Problem


def dense(problem: Problem) -> str | None:
    if problem.activation is not None:
        return "takes activations as they are, not rounded to 8 bits"
    if problem.device != "cpu" and problem.requested is None:
        return "holds the weight unpacked; on a GPU it must be asked for by name"
    return None
