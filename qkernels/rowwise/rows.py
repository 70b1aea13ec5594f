"""Dispatch table of the row operations: conversions, norms and activations."""

from qkernels.dispatch import triton_or_reference
from qkernels.problem import (
    HALF_DTYPES,
    QUANTIZE_MAX_INPUTS,
    Problem,
    has_float8_products,
    needs_triton,
    needs_triton_on_gpu,
    refuses_activation,
)

FUSED_MAX_INPUTS = 2**14  # less than QUANTIZE_MAX_INPUTS: the norm or activation needs registers


def _refuses_float8(problem: Problem) -> str | None:
    reason = needs_triton(problem)
    if reason is None and problem.activation.type == "float" and problem.device == "cuda":
        reason = None if has_float8_products() else "float8 needs an sm_89 GPU or later"
    return reason


def triton_quantize(problem: Problem) -> str | None:
    reason = _refuses_float8(problem)
    if reason is None and problem.activation.per == "group":
        return _refuses_groups(problem)
    return reason or _refuses_rows(problem, QUANTIZE_MAX_INPUTS)


def triton_norm(problem: Problem) -> str | None:
    if problem.form == "tensor":
        return needs_triton_on_gpu(problem)
    if problem.form == "limbs":
        return triton_limbs(problem)
    return _refuses_float8(problem) or _refuses_rows(problem, FUSED_MAX_INPUTS)


def triton_activate(problem: Problem) -> str | None:
    if problem.form == "tensor":
        return needs_triton_on_gpu(problem)
    if problem.form == "limbs":
        return triton_limbs(problem)
    limit = QUANTIZE_MAX_INPUTS if problem.dtype in HALF_DTYPES else FUSED_MAX_INPUTS
    return _refuses_float8(problem) or _refuses_rows(problem, limit)


def triton_embed_norms(problem: Problem) -> str | None:
    return needs_triton_on_gpu(problem) if problem.form == "tensor" else triton_limbs(problem)


def triton_limbs(problem: Problem) -> str | None:
    reason = needs_triton(problem)
    if reason is None and problem.dtype not in HALF_DTYPES:
        reason = f"takes float16 and bfloat16, not {problem.dtype}"
    return reason


def _refuses_rows(problem: Problem, max_inputs: int) -> str | None:
    reason = refuses_activation(problem.activation)
    if reason is None and problem.in_features > max_inputs:
        reason = f"holds a row in registers: at most {max_inputs} inputs"
    return reason


def _refuses_groups(problem: Problem) -> str | None:
    size = problem.activation.group_size
    if not problem.activation.dynamic or size not in (32, 64, 128, 256):
        return f"takes dynamic groups of 32, 64, 128 or 256, not {problem.activation}"
    if problem.in_features % size:
        return f"takes groups that divide the inputs, not {problem.in_features} inputs"
    return None


QUANTIZE_INPUT = triton_or_reference("rowwise", "quantize_input", "quantize", triton_quantize)
TO_LIMBS = triton_or_reference("rowwise", "to_limbs", "limbs", triton_limbs)
NORM = triton_or_reference("rowwise", "norm", "norm", triton_norm)
ACTIVATE = triton_or_reference("rowwise", "activate", "activate", triton_activate)
EMBED_NORMS = triton_or_reference("rowwise", "embed_norms", "embed_norms", triton_embed_norms)
OPERATIONS = (QUANTIZE_INPUT, TO_LIMBS, NORM, ACTIVATE, EMBED_NORMS)
