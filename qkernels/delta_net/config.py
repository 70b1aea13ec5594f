"""Tile sizes of the gated delta net's kernels, in plain Python. Legend: see ops.py."""

from dataclasses import dataclass, replace

import torch

from qkernels.gpu.config import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Launch config of delta_rule_ for requests with few rows."""

    keys: int  # K, padded to a power of two
    columns: int  # columns (values) of a head's state per program
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConfig:
    """Launch configs of the two kernels of delta_rule_ for longer prompts."""

    rows: int  # rows per chunk
    keys: int  # K, padded to a power of two
    operands: torch.dtype  # dtype of product operands, and of the first kernel's results
    precision: str  # input precision of products with float32 operands
    columns: int  # columns of a head's state per program of the scan
    stages: int  # pipeline stages of the scan's loop
    system_warps: int
    system_registers: int | None  # most registers per thread; None: the compiler chooses
    scan_warps: int


def step_config(K: int, V: int) -> StepConfig:
    """Return the config for few rows.

    32 columns of 128 keys are 16 KiB: the state stays in registers, and 32 heads make 128 programs,
    which fill a GPU with one request.
    """
    keys, width = max(16, power_of_two(K)), max(16, power_of_two(V))
    return StepConfig(keys=keys, columns=min(32, width), warps=4)


def recurrence_config(K: int, V: int) -> StepConfig:
    """Return the config of the recurrence over all rows.

    One warp has few columns, so that sums over keys stay within the warp and many programs fit.
    """
    return StepConfig(keys=max(16, power_of_two(K)), columns=8, warps=1)


def chunk_config(K: int, V: int, dtype: torch.dtype, arch: str) -> ChunkConfig:
    """Return the config for longer prompts. `arch` is a name from qkernels.gpu.device.arch.

    Products are in bfloat16 if activations are. float16 has too few exponent bits for a state, so
    float16 activations use tf32, and float32 activations use three tf32 products for each.
    """
    keys, width = max(16, power_of_two(K)), max(16, power_of_two(V))
    is_float = dtype == torch.float32
    # smaller heads, which no model has, use the more exact products
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
        # wgmma reads operands from shared memory; on other GPUs 64 rows overflow the registers.
        # With two stages, the next chunk's loads would start only after a chunk's products.
        return replace(config, rows=64, stages=3, scan_warps=4)
    return config
