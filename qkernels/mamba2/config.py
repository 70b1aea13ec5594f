"""Tile sizes of Mamba-2's kernels, in plain Python. Legend: see ops.py."""

from dataclasses import dataclass

import torch

from qkernels.gpu.config import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Launch config of selective_scan_ for requests with few rows."""

    state: int  # N, padded to a power of two
    columns: int  # columns of a head's state per program
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanConfig:
    """Launch config of selective_scan_ for longer prompts."""

    rows: int  # rows per chunk
    state: int  # N, padded to a power of two
    columns: int  # columns of a head's state per program
    operands: torch.dtype  # dtype of product operands
    precision: str  # input precision of products with float32 operands
    warps: int
    stages: int


def step_config(N: int, D: int) -> StepConfig:
    """Return the config for few rows.

    32 columns of 128 states are 16 KiB, which stay in registers.
    """
    return StepConfig(state=_padded(N), columns=min(32, _padded(D)), warps=4)


def recurrence_config(N: int, D: int) -> StepConfig:
    """Return the config of the recurrence over all rows.

    One warp has few columns, so that sums over states stay within the warp and many programs fit.
    """
    return StepConfig(state=_padded(N), columns=8, warps=1)


def scan_config(N: int, D: int, dtype: torch.dtype) -> ScanConfig:
    """Return the config for longer prompts.

    Products are in bfloat16 if activations are. float16 has too few exponent bits for a state, so
    float16 activations use tf32, and float32 activations use three tf32 products for each.
    """
    state = _padded(N)
    if dtype == torch.bfloat16:
        rows, operands, precision = 64 if state <= 128 else 32, torch.bfloat16, "tf32"
    else:
        rows, operands = 16, torch.float32
        precision = "tf32x3" if dtype == torch.float32 else "tf32"
    return ScanConfig(
        rows=rows,
        state=state,
        # With 16 columns and 64 rows, machine code of Triton 3.6 for sm_90 reads shared memory out
        # of bounds (states of 32, 8 warps), so heads of 16 leave half of the columns unused.
        columns=16 if state > 128 else 32,
        operands=operands,
        precision=precision,
        warps=8,
        stages=1 if operands == torch.float32 else 2,
    )


def _padded(size: int) -> int:
    """Pad a size for tiles of products, which have at least 16 rows and columns."""
    return max(16, power_of_two(size))
