"""Rows of `linear` for 8-bit codes on both sides."""

import functools

import torch

from formats.scheme import ALL
from qkernels.choice import FIXED_ORDER
from qkernels.dispatch import Kernel
from qkernels.gpu import device as gpu_device
from qkernels.problem import (
    HALF_DTYPES,
    QUANTIZE_MAX_INPUTS,
    Problem,
    has_float8_products,
    needs_triton,
    refuses_activation,
)
from qkernels.tuning import table as tuning_table
from qkernels.tuning.op import bucket
from qkernels.w8a8.config import W8A8Sm90Config, W8A8TritonConfig
from qkernels.w8a8.tuned import TUNED


def note_measured(problem: Problem, config: type) -> str:
    """Return a note on the configs that were measured for this kernel on this GPU; "" for none."""
    if problem.device != "cuda" or not torch.cuda.is_available():
        return ""
    if problem.activation.per == "group":  # tables have no configs for blocks
        return ""
    rows = tuning_table.tuning_table_of(torch.device("cuda", torch.cuda.current_device())).measured(
        TUNED,
        N=problem.out_features,
        K=problem.in_features,
        integers=problem.activation.type == "int",
    )
    most = sorted(bucket(row.problem["M"]) for row in rows if isinstance(row.config, config))
    found = ", ".join(f"up to {each} rows" for each in most)
    return f"configs measured on this GPU: {found}" if most else ""


def triton_w8a8(problem: Problem) -> str | None:
    spec, activation = problem.spec, problem.activation
    reason = needs_triton(problem)
    if reason is not None:
        return reason
    if activation is None:
        return "takes activations rounded to 8 bits, not 16-bit ones"
    if spec is None or spec.bits != 8 or not spec.symmetric or spec.type != activation.type:
        return f"takes symmetric int8 or float8 on both sides, not {spec} and {activation}"
    if activation.per == "group":
        reason = _refuses_blocks(problem)
    elif spec.group_length(problem.in_features) != problem.in_features or spec.rows not in (1, ALL):
        reason = "takes one scale for each output or one for all, not blocks or groups"
    else:
        reason = refuses_activation(activation)
    if reason is not None:
        return reason
    if problem.in_features > QUANTIZE_MAX_INPUTS:
        return f"holds a row in registers: at most {QUANTIZE_MAX_INPUTS} inputs"
    if problem.in_features % 32 or problem.out_features % 8:
        return (
            "takes inputs divisible by 32 and outputs divisible by 8,"
            f" not {problem.in_features} and {problem.out_features}"
        )
    if spec.type == "float" and problem.device == "cuda" and not has_float8_products():
        return "float8 products need an sm_89 GPU or later"
    return None


def _refuses_blocks(problem: Problem) -> str | None:
    """Return why the 8-bit products cannot take scales for groups of inputs; None: they can."""
    spec, activation = problem.spec, problem.activation
    sizes = (spec.rows, spec.group_size, activation.group_size)
    if spec.type != "float" or not activation.dynamic or sizes != (128, 128, 128):
        return (
            "takes groups of inputs as dynamic float8 by 128 under a weight in blocks of 128 x 128,"
            f" not {spec} and {activation}"
        )
    if problem.in_features % 128:
        return f"takes blocks that divide the inputs, not {problem.in_features} inputs"
    return None


def portable_w8a8(problem: Problem) -> str | None:
    reason = triton_w8a8(problem)
    if reason is None and problem.requested == FIXED_ORDER and problem.spec.type == "float":
        return "adds float8 products in an order that depends on the number of rows"
    return reason


def sm90_w8a8(problem: Problem) -> str | None:
    reason = triton_w8a8(problem)
    if reason is not None:
        return reason
    if problem.dtype not in HALF_DTYPES:
        return f"gives float16 and bfloat16, not {problem.dtype}"
    return gpu_device.lacks_arch(torch.device(problem.device), "sm_90")


def cpu_w8a8(problem: Problem) -> str | None:
    spec, activation = problem.spec, problem.activation
    if problem.device != "cpu":
        return f"runs on cpu, not on {problem.device}"
    if activation is None or activation.type != "int" or activation.per == "group":
        return f"takes activations rounded to int8 with a scale for each row, not {activation}"
    if spec is None or (spec.bits, spec.symmetric, spec.type) != (8, True, "int"):
        return f"takes symmetric int8 weights, not {spec}"
    if spec.group_length(problem.in_features) != problem.in_features:
        return "takes one scale for each output, not groups"
    from qkernels.w8a8.cpu import product_is_exact

    return None if product_is_exact() else "torch's int8 product is not exact on this CPU"


# All of them have a fixed-order variant: integer products are exact in any order, and float8
# products have separate configs (sm90.py).
KERNELS = (
    Kernel(
        name="sm90_w8a8",
        module="w8a8.sm90",
        priority=30,
        supports=sm90_w8a8,
        note=functools.partial(note_measured, config=W8A8Sm90Config),
        variants=("sm90", FIXED_ORDER),
    ),
    Kernel(
        name="triton_w8a8",
        module="w8a8.triton_gemm",
        priority=30,
        supports=portable_w8a8,
        note=functools.partial(note_measured, config=W8A8TritonConfig),
        variants=("triton", FIXED_ORDER),
    ),
    Kernel(
        name="cpu_w8a8",
        module="w8a8.cpu",
        priority=25,
        supports=cpu_w8a8,
        variants=("cpu", FIXED_ORDER),
    ),
)
