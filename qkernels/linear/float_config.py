"""Launch configs of triton_float.py, in plain Python.

Legend: M rows of x, N outputs.
"""

from dataclasses import dataclass

from qkernels.gpu.config import ceil_div, power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatConfig:
    """Launch config of triton_float.py: tiles of block_m rows by block_n outputs."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    weight_is_a: bool  # compute y^T = W x^T, so that the few rows of x are the narrow B operand


def float_config(M: int, N: int, sm_count: int) -> FloatConfig:
    """Return the config for M rows.

    K cannot be split without changing the order of sums, so narrow tiles must fill the GPU.
    """
    if M <= 64:
        wide = ceil_div(N, 128) >= 2 * sm_count
        return FloatConfig(
            block_m=max(16, power_of_two(M)),
            block_n=128 if wide else 64,
            block_k=128 if M <= 32 else 64,
            warps=4,
            stages=4,
            weight_is_a=True,
        )
    large = ceil_div(M, 128) * ceil_div(N, 256)
    if large < sm_count:
        return FloatConfig(
            block_m=128, block_n=64, block_k=64, warps=4, stages=4, weight_is_a=False
        )
    return FloatConfig(block_m=128, block_n=256, block_k=64, warps=8, stages=3, weight_is_a=False)
