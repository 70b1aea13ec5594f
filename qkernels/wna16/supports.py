"""Why a row of dispatch.py cannot multiply a packed weight and 16-bit activations; None: it can."""

import torch

from qkernels.gpu import device as gpu_device
from qkernels.operands.limbs import K_STEP, LIMBS_MAX_ROWS
from qkernels.problem import HALF_DTYPES, Problem, needs_triton
from qkernels.tuning import table as tuning_table
from qkernels.tuning.op import bucket
from qkernels.wna16.layout import MIN_K_STEP, k_step
from qkernels.wna16.sm90_small_m_config import SMALL_M_ROWS
from qkernels.wna16.tuned import TUNED

FAST_CPUS = ("AVX2", "AVX512")  # where torch has vector code for its packed products
CPU_GROUPS = (32, 64, 128, 256)


def _refuses_weight(problem: Problem, bits: int) -> str | None:
    """Why it is no integer weight of so many bits alone; None: it is."""
    if problem.spec is None or (problem.spec.bits, problem.spec.type) != (bits, "int"):
        return f"takes {bits}-bit integer weights, not {problem.spec}"
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
    group = problem.spec.group_length(problem.in_features)
    if k_step(group) < MIN_K_STEP or problem.in_features % group:
        return f"takes groups divisible by {MIN_K_STEP}, not {group}"
    if problem.out_features % 8:
        return f"takes a number of outputs divisible by 8, not {problem.out_features}"
    if problem.out_features * problem.in_features * bits // 32 >= 2**31:
        return "the weight's words cannot be counted in 32 bits"
    return None


def _note_weight_only_body(problem: Problem) -> str:
    """Which body runs where the config prefers one for Hopper: it chooses by the number of rows."""
    lacks = gpu_device.lacks_gluon(torch.device(problem.device))
    group = problem.spec.group_length(problem.in_features)
    if lacks is None and k_step(group) != K_STEP:
        lacks = f"takes groups divisible by {K_STEP}, not {group}"
    if lacks is not None:
        return f"all rows take the portable body; those for Hopper: {lacks}"
    few = f"up to {LIMBS_MAX_ROWS} rows go as limbs"
    if problem.spec.bits == 4:
        few += f" or through the ring, up to {SMALL_M_ROWS[-1]} through the ring"
    return f"{few}, many rows take the Hopper body"


def note_weight_only(problem: Problem) -> str:
    """The bodies, and for how many rows this GPU has measured tiles of its own."""
    note = _note_weight_only_body(problem)
    if problem.device != "cuda" or not torch.cuda.is_available():
        return note
    rows = tuning_table.tuning_table_of(torch.device("cuda", torch.cuda.current_device())).measured(
        TUNED,
        N=problem.out_features,
        K=problem.in_features,
        group=problem.spec.group_length(problem.in_features),
        bits=problem.spec.bits,
    )
    tiles = {
        bucket(row.problem["M"]): "the library" if row.config is None else type(row.config).__name__
        for row in rows
    }
    found = ", ".join(f"up to {most} rows {tiles[most]}" for most in sorted(tiles))
    return f"{note}; measured on this GPU: {found}" if tiles else note


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
    group = problem.spec.group_length(problem.in_features)
    if bits == 8 and (not problem.spec.symmetric or group != problem.in_features):
        return f"takes symmetric codes of one scale for each output, not {problem.spec}"
    if bits == 4 and (group not in CPU_GROUPS or problem.in_features % group):
        return f"takes groups of {', '.join(map(str, CPU_GROUPS))}, not {group}"
    if bits == 4 and problem.out_features % 16:
        return f"takes a number of outputs divisible by 16, not {problem.out_features}"
    if problem.in_features % 16:  # torch 2.13 reads over the end of x and of the weight
        return f"takes a number of inputs divisible by 16, not {problem.in_features}"
    return None
