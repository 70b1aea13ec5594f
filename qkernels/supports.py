"""Why a row of dispatch.py cannot do a problem; None: it can. Imports no kernel."""

import functools
import importlib.util
import os
from dataclasses import dataclass

import torch

from formats.scheme import ALL, ActivationSpec, QuantSpec
from qkernels.launch import lacks_gluon, tile_table_of
from qkernels.tile_table import bucket
from qkernels.tiles import (
    LINEAR_DIGITS_MAX_ROWS,
    LINEAR_MAX_BLOCK_K,
    LINEAR_MIN_BLOCK_K,
    linear_block_k,
)
from qkernels.w4a16_ring_tiles import LINEAR_RING_ROWS

HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32)
CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)  # of pages
QUANTIZE_MAX_INPUTS = 2**15  # 32 for each thread of the largest block; 64 spill
FAST_CPUS = ("AVX2", "AVX512")  # where torch has vector code for its packed products
CPU_GROUPS = (32, 64, 128, 256)
KV_WRITE_MAX_HEAD_DIM = 1024  # a head lies in one program's registers
FUSED_MAX_INPUTS = 2**14  # what is computed before takes registers too


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a row is asked to support. An operation reads the fields that it has."""

    device: str  # "cuda" or "cpu"
    dtype: torch.dtype  # of the activations
    requested: str | None = None  # the kernel that the caller asked for by name
    spec: QuantSpec | None = None
    activation: ActivationSpec | None = None
    out_features: int = 0
    in_features: int = 0
    head_dim: int = 0
    page_size: int = 0
    pages_dtype: torch.dtype | None = None  # of keys and values; None: the activations'
    soft_cap: bool = False  # scores are bent into a range
    chunk: bool = False  # more query rows than a decode step has
    bulk_pages: bool = True  # the copy engine takes their address and strides


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _needs_triton(problem: Problem) -> str | None:
    if not _has_triton():
        return "triton is not installed"
    # TRITON_INTERPRET is triton's own switch: the same kernel then runs on a CPU, very slowly
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and problem.requested is not None
    if problem.device != "cuda" and not interpreted:
        return f"runs on cuda, not on {problem.device}"
    return None


def needs_triton_on_gpu(problem: Problem) -> str | None:
    reason = _needs_triton(problem)
    if reason is None and problem.dtype not in FLOAT_DTYPES:
        return f"takes float16, bfloat16 and float32, not {problem.dtype}"
    return reason


def _refuses_weight(problem: Problem, bits: int) -> str | None:
    """Why it is no integer weight of so many bits alone; None: it is."""
    if problem.spec is None or (problem.spec.bits, problem.spec.type) != (bits, "int"):
        return f"takes {bits}-bit integer weights, not {problem.spec}"
    if problem.activation is not None:
        return "takes 16-bit activations, not 8-bit ones"
    return None


def triton_weight_only(problem: Problem, bits: int) -> str | None:
    reason = _needs_triton(problem)
    if reason is not None:
        return reason
    if problem.dtype not in HALF_DTYPES:
        return f"takes float16 and bfloat16, not {problem.dtype}"
    reason = _refuses_weight(problem, bits)
    if reason is not None:
        return reason
    group = problem.spec.group_length(problem.in_features)
    if linear_block_k(group) < LINEAR_MIN_BLOCK_K or problem.in_features % group:
        return f"takes groups divisible by {LINEAR_MIN_BLOCK_K}, not {group}"
    if problem.out_features % 8:
        return f"takes a number of outputs divisible by 8, not {problem.out_features}"
    if problem.out_features * problem.in_features * bits // 32 >= 2**31:
        return "the weight's words cannot be counted in 32 bits"
    return None


def _note_weight_only_body(problem: Problem) -> str:
    """Which body runs where tiles.py prefers one for Hopper: it chooses by the number of rows."""
    lacks = lacks_gluon(torch.device(problem.device))
    group = problem.spec.group_length(problem.in_features)
    if lacks is None and linear_block_k(group) != LINEAR_MAX_BLOCK_K:
        lacks = f"takes groups divisible by {LINEAR_MAX_BLOCK_K}, not {group}"
    if lacks is not None:
        return f"all rows take the portable body; those for Hopper: {lacks}"
    few = f"up to {LINEAR_DIGITS_MAX_ROWS} rows go as digits"
    if problem.spec.bits == 4:
        few += f" or through the ring, up to {LINEAR_RING_ROWS[-1]} through the ring"
    return f"{few}, many rows take the Hopper body"


def note_weight_only(problem: Problem) -> str:
    """The bodies, and for how many rows this GPU has measured tiles of its own."""
    note = _note_weight_only_body(problem)
    if problem.device != "cuda" or not torch.cuda.is_available():
        return note
    rows = tile_table_of(torch.device("cuda", torch.cuda.current_device())).measured(
        "w4a16",
        N=problem.out_features,
        K=problem.in_features,
        group=problem.spec.group_length(problem.in_features),
        bits=problem.spec.bits,
    )
    tiles = {
        bucket(row.problem["M"]): "the library" if row.tile is None else type(row.tile).__name__
        for row in rows
    }
    found = ", ".join(f"up to {most} rows {tiles[most]}" for most in sorted(tiles))
    return f"{note}; measured on this GPU: {found}" if tiles else note


def note_int8(problem: Problem, tile: type) -> str:
    """For how many rows this GPU has measured tiles of the kernel's own kind; "" for none."""
    if problem.device != "cuda" or not torch.cuda.is_available():
        return ""
    if problem.activation.per == "group":  # no table is for blocks
        return ""
    rows = tile_table_of(torch.device("cuda", torch.cuda.current_device())).measured(
        "w8a8",
        N=problem.out_features,
        K=problem.in_features,
        integers=problem.activation.type == "int",
    )
    most = sorted(bucket(row.problem["M"]) for row in rows if isinstance(row.tile, tile))
    found = ", ".join(f"up to {each} rows" for each in most)
    return f"tiles measured on this GPU: {found}" if most else ""


def triton_w8a8(problem: Problem) -> str | None:
    spec, activation = problem.spec, problem.activation
    reason = _needs_triton(problem)
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
        reason = _refuses_activation(activation)
    if reason is not None:
        return reason
    if problem.in_features > QUANTIZE_MAX_INPUTS:
        return f"holds a row in registers: at most {QUANTIZE_MAX_INPUTS} inputs"
    if problem.in_features % 32 or problem.out_features % 8:
        return (
            "takes inputs divisible by 32 and outputs divisible by 8,"
            f" not {problem.in_features} and {problem.out_features}"
        )
    if spec.type == "float" and problem.device == "cuda" and not _has_float8_products():
        return "float8 products need an sm_89 GPU or later"
    return None


def _refuses_blocks(problem: Problem) -> str | None:
    """Why the 8-bit products cannot take scales for groups of inputs; None: they can."""
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


def hopper_w8a8(problem: Problem) -> str | None:
    reason = triton_w8a8(problem)
    if reason is not None:
        return reason
    if problem.dtype not in HALF_DTYPES:
        return f"gives float16 and bfloat16, not {problem.dtype}"
    return lacks_gluon(torch.device(problem.device))


def _refuses_activation(activation: ActivationSpec) -> str | None:
    """Why act_quant.py cannot round so; None: it can."""
    if activation.per == "group" or (activation.dynamic and activation.per == "tensor"):
        return (
            f"rounds with a scale for each token or a static one, not one for each {activation.per}"
        )
    return None


@functools.cache
def _has_float8_products() -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def _refuses_float8(problem: Problem) -> str | None:
    reason = _needs_triton(problem)
    if reason is None and problem.activation.type == "float" and problem.device == "cuda":
        reason = None if _has_float8_products() else "float8 needs an sm_89 GPU or later"
    return reason


def triton_quantize(problem: Problem) -> str | None:
    reason = _refuses_float8(problem)
    if reason is None and problem.activation.per == "group":
        return _refuses_groups(problem)
    return reason or _refuses_rows(problem, QUANTIZE_MAX_INPUTS)


def triton_quantize_asymmetric(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and problem.in_features > QUANTIZE_MAX_INPUTS:
        reason = f"holds a row in registers: at most {QUANTIZE_MAX_INPUTS} inputs"
    return reason


def triton_norm_quantize(problem: Problem) -> str | None:
    return _refuses_float8(problem) or _refuses_rows(problem, FUSED_MAX_INPUTS)


def triton_silu_quantize(problem: Problem) -> str | None:
    limit = QUANTIZE_MAX_INPUTS if problem.dtype in HALF_DTYPES else FUSED_MAX_INPUTS
    return _refuses_float8(problem) or _refuses_rows(problem, limit)


def triton_digits(problem: Problem) -> str | None:
    reason = _needs_triton(problem)
    if reason is None and problem.dtype not in HALF_DTYPES:
        reason = f"takes float16 and bfloat16, not {problem.dtype}"
    return reason


def _refuses_rows(problem: Problem, max_inputs: int) -> str | None:
    reason = _refuses_activation(problem.activation)
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
    from qkernels.cpu_w8a8 import product_is_exact

    return None if product_is_exact() else "torch's int8 product is not exact on this CPU"


def dense(problem: Problem) -> str | None:
    if problem.activation is not None:
        return "takes activations as they are, not rounded to 8 bits"
    if problem.device != "cpu" and problem.requested is None:
        return "holds the weight unpacked; on a GPU it must be asked for by name"
    return None


def triton_attention(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and not 16 <= problem.head_dim <= 256:
        return f"takes heads of 16 to 256, not {problem.head_dim}"
    if reason is None and problem.page_size not in (16, 32, 64, 128):
        return f"takes pages of 16, 32, 64 or 128 tokens, not {problem.page_size}"
    return reason or _refuses_pages(problem)


def _refuses_pages(problem: Problem) -> str | None:
    """Why the GPU cannot read or write such pages; None: it can."""
    if problem.pages_dtype == torch.float8_e4m3fn and problem.device == "cuda":
        return None if _has_float8_products() else "float8 pages need an sm_89 GPU or later"
    return None


def triton_kv_write(problem: Problem) -> str | None:
    reason = needs_triton_on_gpu(problem)
    if reason is None and problem.head_dim > KV_WRITE_MAX_HEAD_DIM:
        return f"takes heads of up to {KV_WRITE_MAX_HEAD_DIM}, not {problem.head_dim}"
    return reason or _refuses_pages(problem)


def hopper_attention(problem: Problem) -> str | None:
    reason = _needs_triton(problem) or lacks_gluon(torch.device(problem.device))
    if reason is not None:
        return reason
    if not problem.chunk:
        return "made for the many rows of a prompt chunk"
    if problem.dtype not in HALF_DTYPES:
        return f"takes float16 and bfloat16, not {problem.dtype}"
    if problem.pages_dtype not in (None, problem.dtype, *CODE_DTYPES):
        return f"takes pages of {problem.dtype}, int8 or float8, not {problem.pages_dtype}"
    if not 16 <= problem.head_dim <= 128 or problem.head_dim % 8:
        return f"takes heads of 16 to 128, divisible by 8, not {problem.head_dim}"
    if problem.page_size not in (16, 32, 64, 128):
        return f"takes pages of 16, 32, 64 or 128 tokens, not {problem.page_size}"
    if not problem.bulk_pages:
        return "takes pages whose address and strides are multiples of 16 bytes"
    return None


def anything(problem: Problem) -> str | None:
    return None
