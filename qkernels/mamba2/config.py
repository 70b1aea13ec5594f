"""Tiles of Mamba-2's kernels, in plain Python. Legend as in ops.py."""

from dataclasses import dataclass

import torch

from qkernels.gpu.config import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """One launch of selective_scan_ for rows that are their request's only one."""

    state: int  # N, as a power of two
    columns: int  # of a head's state in one program
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanConfig:
    """One launch of selective_scan_ for longer prompts."""

    rows: int  # of a chunk
    state: int  # N, as a power of two
    columns: int  # of a head's state in one program
    operands: torch.dtype  # of products
    precision: str  # of products, where operands are float32
    warps: int
    stages: int


def step_config(N: int, D: int) -> StepConfig:
    """32 columns of 128 states are 16 KiB, which stay in registers."""
    return StepConfig(state=_padded(N), columns=min(32, _padded(D)), warps=4)


def recurrence_config(N: int, D: int) -> StepConfig:
    """One warp for few columns: sums over states need no other warp, and many programs fit."""
    return StepConfig(state=_padded(N), columns=8, warps=1)


def scan_config(N: int, D: int, dtype: torch.dtype) -> ScanConfig:
    """Products in bfloat16 where activations are; float16 has too few exponents for a state, so it
    takes tf32, and float32 three products of tf32 for each.
    """
    state, width = _padded(N), _padded(D)
    narrow = min(16 if state > 128 else 32, width)
    if dtype == torch.bfloat16:
        rows, operands, precision = 64 if state <= 128 else 32, torch.bfloat16, "tf32"
    else:
        rows, operands = 16, torch.float32
        precision = "tf32x3" if dtype == torch.float32 else "tf32"
    return ScanConfig(
        rows=rows,
        state=state,
        columns=narrow,
        operands=operands,
        precision=precision,
        warps=8,
        stages=1 if operands == torch.float32 else 2,
    )


def _padded(size: int) -> int:
    """Tiles of products have 16 rows and columns at least."""
    return max(16, power_of_two(size))
