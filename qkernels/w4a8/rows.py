"""Rows of `linear` for 4-bit weights with 8-bit activations."""

import functools

import torch

from formats.scheme import Scheme
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
from qkernels.w4a8.config import MULTIPLES, W4A8Sm90Config, W4A8TritonConfig
from qkernels.w4a8.layout import K_STEP, MIN_K_STEP
from qkernels.w4a8.tuned import TUNED


def note_measured(problem: Problem, config: type) -> str:
    """Return a note on the configs that were measured for this kernel on this GPU; "" for none."""
    if problem.device != "cuda" or not torch.cuda.is_available():
        return ""
    K = problem.in_features
    groups = {problem.spec.group_length(K)}
    if config is W4A8Sm90Config and _sums_integers(problem):
        groups.add(K)  # the key of configs of multiples
    table = tuning_table.tuning_table_of(torch.device("cuda", torch.cuda.current_device()))
    integers = problem.activation.type == "int"
    rows = [
        row
        for group in groups
        for row in table.measured(
            TUNED, N=problem.out_features, K=K, group=group, integers=integers
        )
    ]
    most = sorted(bucket(row.problem["M"]) for row in rows if isinstance(row.config, config))
    found = ", ".join(f"up to {each} rows" for each in most)
    return f"configs measured on this GPU: {found}" if most else ""


def note_sm90(problem: Problem) -> str:
    """Return note_measured, and which weights run variant MULTIPLES."""
    notes = [note_measured(problem, W4A8Sm90Config)]
    if _sums_integers(problem):
        notes.insert(0, f"{MULTIPLES} if scales of each row are multiples of one number")
    return "; ".join(filter(None, notes))


def _sums_integers(problem: Problem) -> bool:
    """Return True if products are sums of integers if scales are multiples of one number."""
    scheme = Scheme(weight=problem.spec, activation=problem.activation)
    in_groups = problem.spec.group_length(problem.in_features) != problem.in_features
    return scheme.sums_integers and in_groups


def _refuses_numerics(problem: Problem) -> str | None:
    """Return why no W4A8 kernel takes the weight and the activation; None: they do."""
    spec, activation = problem.spec, problem.activation
    if activation is None:
        return "takes activations rounded to 8 bits, not 16-bit ones"
    if spec is None or (spec.bits, spec.symmetric, spec.type) != (4, True, "int"):
        return f"takes symmetric 4-bit integer weights, not {spec}"
    return refuses_activation(activation)


def triton_w4a8(problem: Problem) -> str | None:
    reason = needs_triton(problem) or _refuses_numerics(problem)
    if reason is not None:
        return reason
    group = problem.spec.group_length(problem.in_features)
    if group % MIN_K_STEP or problem.in_features % group:
        return f"takes groups divisible by {MIN_K_STEP}, not {group}"
    if problem.in_features > QUANTIZE_MAX_INPUTS:
        return f"holds a row in registers: at most {QUANTIZE_MAX_INPUTS} inputs"
    if problem.out_features % 8:
        return f"takes a number of outputs divisible by 8, not {problem.out_features}"
    floats = problem.activation.type == "float"
    if floats and problem.device == "cuda" and not has_float8_products():
        return "float8 products need an sm_89 GPU or later"
    return None


def portable_w4a8(problem: Problem) -> str | None:
    reason = triton_w4a8(problem)
    if reason is None and problem.requested == FIXED_ORDER and problem.activation.type == "float":
        return "adds float8 products in an order that depends on the number of rows"
    return reason


def sm90_w4a8(problem: Problem) -> str | None:
    reason = triton_w4a8(problem)
    if reason is not None:
        return reason
    if problem.dtype not in HALF_DTYPES:
        return f"gives float16 and bfloat16, not {problem.dtype}"
    group = problem.spec.group_length(problem.in_features)
    if problem.in_features % K_STEP or (K_STEP % group and group % K_STEP):
        return f"takes inputs and groups in steps of {K_STEP} inputs, not groups of {group}"
    return gpu_device.lacks_arch(torch.device(problem.device), "sm_90")


def cpu_w4a8(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"runs on cpu, not on {problem.device}"
    reason = _refuses_numerics(problem)
    if reason is not None:
        return reason
    return None if problem.activation.type == "int" else "takes int8 activations, not float8"


# All of them have a fixed-order variant: the sum of a group is an integer, exact in any order, and
# groups are added in order. For float8 only the sm_90 kernel has it.
KERNELS = (
    Kernel(
        name="sm90_w4a8",
        module="w4a8.sm90",
        priority=30,
        supports=sm90_w4a8,
        note=note_sm90,
        variants=("sm90", FIXED_ORDER),
    ),
    Kernel(
        name="triton_w4a8",
        module="w4a8.triton_gemm",
        priority=30,
        supports=portable_w4a8,
        note=functools.partial(note_measured, config=W4A8TritonConfig),
        variants=("triton", FIXED_ORDER),
    ),
    Kernel(
        name="cpu_w4a8",
        module="w4a8.cpu",
        priority=25,
        supports=cpu_w4a8,
        variants=("cpu", FIXED_ORDER),
    ),
)
