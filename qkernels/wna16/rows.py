"""Rows of `linear` for packed weights with 16-bit activations."""

import functools

import torch

from formats.scheme import FP4_TYPES
from qkernels.choice import parse_choice
from qkernels.dispatch import Kernel
from qkernels.problem import HALF_DTYPES, Problem, needs_triton
from qkernels.tuning import table as tuning_table
from qkernels.tuning.op import bucket
from qkernels.wna16.layout import MIN_K_STEP, Fp4Spec, k_step, kernel_spec
from qkernels.wna16.tuned import TUNED
from qkernels.wna16.variants import BY_NAME, NAMES, Shape, variant_of

FAST_CPUS = ("AVX2", "AVX512")  # CPUs for which torch has vectorized packed products
CPU_GROUPS = (32, 64, 128, 256)
_CODE_BITS = {4: "2 to 4", 8: "5 to 8"}  # bits of a stored code -> of the weight's codes


def _refuses_weight(problem: Problem, bits: int) -> str | None:
    """Return why kernels cannot store the weight in codes of `bits` bits; None: they can."""
    spec = problem.spec
    if spec is not None:
        spec = kernel_spec(spec, problem.in_features)
    if spec is None or (spec.bits, spec.type) != (bits, "int"):
        return f"takes integer weights of {_CODE_BITS[bits]} bits, not {problem.spec}"
    if problem.activation is not None:
        return "takes 16-bit activations, not 8-bit ones"
    return None


def triton_weight_only(problem: Problem, bits: int) -> str | None:
    reason = needs_triton(problem)
    if reason is not None:
        return reason
    if problem.dtype not in HALF_DTYPES:
        return f"takes float16 and bfloat16, not {problem.dtype}"
    reason = _refuses_weight(problem, bits)
    if reason is not None:
        return reason
    spec = kernel_spec(problem.spec, problem.in_features)
    group = spec.group_length(problem.in_features)
    is_padded = isinstance(spec, Fp4Spec)
    if k_step(group) < MIN_K_STEP or (problem.in_features % group and not is_padded):
        return f"takes groups divisible by {MIN_K_STEP}, not {group}"
    if problem.out_features % 8:
        return f"takes a number of outputs divisible by 8, not {problem.out_features}"
    if problem.out_features * problem.in_features * bits // 32 >= 2**31:
        return "the weight's words cannot be counted in 32 bits"
    return None


def explain_variants(problem: Problem) -> list[tuple[str, str]]:
    """Return (variant, which rows it takes or why it takes none, and measurements on this GPU)."""
    shape = Shape.on(
        torch.device(problem.device),
        N=problem.out_features,
        K=problem.in_features,
        spec=kernel_spec(problem.spec, problem.in_features),
        sm_count=0,  # why a variant refuses a weight does not depend on it
    )
    choice = parse_choice(problem.requested)
    measured = _measured(problem)
    lines = []
    for variant in BY_NAME.values():
        rows = f"{variant.rows}, adds adapters" if variant.adds_adapters else variant.rows
        note = choice.explained(variant.name, variant.refuses(shape), rows)
        lines.append((variant.name, note + measured.get(variant.name, "")))
    return lines


def _measured(problem: Problem) -> dict[str, str]:
    """Return for each variant the numbers of rows for which it was measured as fastest."""
    if problem.device != "cuda" or not torch.cuda.is_available():
        return {}
    spec = kernel_spec(problem.spec, problem.in_features)
    rows = tuning_table.tuning_table_of(torch.device("cuda", torch.cuda.current_device())).measured(
        TUNED,
        N=problem.out_features,
        K=problem.in_features,
        group=spec.group_length(problem.in_features),
        bits=spec.bits,
    )
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(variant_of(row.config).name, []).append(bucket(row.problem["M"]))
    return {
        name: "; measured on this GPU for up to " + ", ".join(map(str, sorted(most))) + " rows"
        for name, most in found.items()
    }


def cpu_weight_only(problem: Problem, bits: int) -> str | None:
    if problem.device != "cpu":
        return f"runs on cpu, not on {problem.device}"
    if torch.backends.cpu.get_cpu_capability() not in FAST_CPUS:
        return f"torch has fast products for {' and '.join(FAST_CPUS)}, not for this CPU"
    if problem.dtype != torch.bfloat16:
        return f"takes bfloat16, not {problem.dtype}: torch's other products take a scalar loop"
    reason = _refuses_weight(problem, bits)
    if reason is not None:
        return reason
    if problem.spec.type != "int" and (bits == 8 or problem.spec.type in FP4_TYPES):
        return f"takes integer weights, not {problem.spec}"
    group = problem.spec.integer_form.group_length(problem.in_features)
    if bits == 8 and (not problem.spec.symmetric or group != problem.in_features):
        return f"takes symmetric codes of one scale for each output, not {problem.spec}"
    if bits == 4 and (group not in CPU_GROUPS or problem.in_features % group):
        return f"takes groups of {', '.join(map(str, CPU_GROUPS))}, not {group}"
    if bits == 4 and problem.out_features % 16:
        return f"takes a number of outputs divisible by 16, not {problem.out_features}"
    if problem.in_features % 16:  # torch 2.13 reads over the end of x and of the weight
        return f"takes a number of inputs divisible by 16, not {problem.in_features}"
    return None


KERNELS = (
    *(
        Kernel(
            name=f"w{bits}a16",
            module="wna16.gemm",
            priority=30,
            supports=functools.partial(triton_weight_only, bits=bits),
            variants=NAMES,
            explain_variants=explain_variants,
        )
        for bits in (4, 8)
    ),
    *(
        Kernel(
            name=f"cpu_w{bits}a16",
            module="wna16.cpu",
            priority=25,
            supports=functools.partial(cpu_weight_only, bits=bits),
            variants=("cpu",),
        )
        for bits in (4, 8)
    ),
)
