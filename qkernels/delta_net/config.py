"""Tiles of the gated delta net's kernels, in plain Python. Legend as in ops.py."""

from dataclasses import dataclass, replace

import torch

from qkernels.gpu.config import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """One launch of delta_rule_ for rows that are their request's only one."""

    keys: int  # K, as a power of two
    columns: int  # of a head's state in one program: of its values
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConfig:
    """The two launches of delta_rule_ for longer prompts."""

    rows: int  # of a chunk
    keys: int  # K, as a power of two
    operands: torch.dtype  # of products, and of what the first kernel hands to the scan
    precision: str  # of products, where operands are float32
    columns: int  # of a head's state in one program of the scan
    stages: int  # of the scan's loop
    system_warps: int
    system_registers: int | None  # of a thread, at most; None: as the compiler likes
    scan_warps: int


def step_config(K: int, V: int) -> StepConfig:
    """32 columns of 128 keys are 16 KiB: the state stays in registers, and 128 programs of 32 heads
    fill a GPU at one request.
    """
    keys, width = max(16, power_of_two(K)), max(16, power_of_two(V))
    return StepConfig(keys=keys, columns=min(32, width), warps=4)


def recurrence_config(K: int, V: int) -> StepConfig:
    """One warp for few columns: sums over keys need no other warp, and many programs fit."""
    return StepConfig(keys=max(16, power_of_two(K)), columns=8, warps=1)


def chunk_config(K: int, V: int, dtype: torch.dtype, arch: str) -> ChunkConfig:
    """Products in bfloat16 where activations are; float16 has too few exponents for a state, so it
    takes tf32, and float32 three products of tf32 for each. `arch`: as qkernels.gpu.device has it.
    """
    keys, width = max(16, power_of_two(K)), max(16, power_of_two(V))
    is_float = dtype == torch.float32
    # Smaller heads, which no model has, take the more exact products.
    in_bfloat16 = dtype == torch.bfloat16 and min(keys, width) >= 64
    config = ChunkConfig(
        rows=32,
        keys=keys,
        operands=dtype if in_bfloat16 else torch.float32,
        precision="tf32x3" if is_float else "tf32",
        columns=min(32, width),
        stages=2,
        system_warps=4,
        system_registers=None,
        scan_warps=8,
    )
    if is_float:
        return replace(config, rows=16, columns=min(16, width), stages=1, system_warps=8)
    if config.operands == torch.float32:
        return replace(config, stages=1, system_warps=8)
    if keys > 128:
        return replace(config, columns=16, system_warps=8)
    if arch == "sm_90":
        # Its products read operands from shared memory. Elsewhere 64 rows overflow the registers.
        # With two stages the next chunk's loads would begin after a chunk's products.
        return replace(config, rows=64, stages=3, scan_warps=4)
    return config
