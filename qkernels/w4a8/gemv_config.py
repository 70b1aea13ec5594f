"""Configs of the W4A8 product for few rows on sm_90 (sm90_gemv.py), in plain Python.

Legend: M rows of x, N outputs, K inputs.
"""

import functools
from dataclasses import dataclass

from qkernels.gpu.config import CompileTimeConfig, ceil_div
from qkernels.w4a8.layout import INT_FACTOR, K_STEP, ZERO

GEMV = "sm90_gemv"  # the variant's name
TILE_ROWS = 8  # rows of x in one product of the tensor core
GEMV_MAX_ROWS = 16
# The kernel is the default up to this number of rows. Predicted, not measured: us for qkv / o /
# gate_up / down of Llama-3-8B, in brackets measured times of sm90.py at 1 and 16 rows.
#
#     M = 1   5.4 / 4.4 / 16.5 / 9.5   (6.9 / 5.8 / 16.5 / 11.2)
#     M = 2   5.4 / 4.4 / 16.6 / 9.6
#     M = 4   5.7 / 4.6 / 16.8 / 9.9
#     M = 8   6.1 / 4.9 / 17.1 / 10.5
#     M = 16  7.3 / 6.0 / 19.5 / 12.5  (7.0 / 5.8 / 17.2 / 11.0)
GEMV_DEFAULT_ROWS = 8
# A warp's sum of codes times multiples is 16 times its value until the end, and fits 32 bits.
_STEP_SUM = int(INT_FACTOR) * ZERO * 15 * 128 * K_STEP
MAX_WARP_STEPS = (2**31 - 1) // _STEP_SUM


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A8GemvConfig(CompileTimeConfig):
    """Launch config of sm90_gemv.py."""

    block_m: int = 8  # rows of x: 8 or 16
    block_n: int = 16  # 16, 32 or 64
    warps: int = 8  # warps per block, each with its own K steps
    steps_in_flight: int = 2  # K steps that a warp loads together: 1, 2 or 4

    def fits(self, M: int, N: int, K: int, sm_count: int) -> bool:
        """Return True if the kernel can run M rows on a GPU; blocks do not wait for each other."""
        return self.block_m >= M

    def fills(self, k_steps: int) -> bool:
        """Return True if all loads of all warps are K steps of the weight."""
        return k_steps % (self.warps * self.steps_in_flight) == 0


def prefers_gemv(M: int, integers: bool) -> bool:
    """Return True if the kernel is the default for M rows of int8 (`integers`) or float8 inputs."""
    return integers and M <= GEMV_DEFAULT_ROWS


@functools.lru_cache(maxsize=4096)
def default_gemv_config(M: int, N: int, K: int, sm_count: int) -> W4A8GemvConfig:
    """Return the config for 1 to 16 rows.

    A load of x touches a cache line for each row, so with more rows a block has more outputs for
    each load of x. Blocks of many warps have more bytes in flight if there are few blocks.
    """
    block_n = 16 if M <= 2 else 32
    if M > 4 and ceil_div(N, 64) >= 2 * sm_count:
        block_n = 64
    warps = 16 if ceil_div(N, block_n) <= sm_count else 8
    per_warp = ceil_div(K // K_STEP, warps)
    steps_in_flight = 1 if block_n == 64 or per_warp == 1 or M > TILE_ROWS else 2
    if warps == 16 and per_warp % 2:
        steps_in_flight = 1
    return W4A8GemvConfig(
        block_m=8 if M <= TILE_ROWS else 16,
        block_n=block_n,
        warps=warps,
        steps_in_flight=steps_in_flight,
    )


def gemv_config_fault(
    config: W4A8GemvConfig, *, M: int, N: int, K: int, group: int, integers: bool = True
) -> str | None:
    """Return why the kernel cannot run the config; None: it can."""
    if not integers:
        return "takes int8 inputs, not float8"
    if config.block_m not in (8, 16) or config.block_m < M:
        return f"block_m must be 8 or 16 and at least {M} rows, found {config.block_m}"
    if config.block_n not in (16, 32, 64):
        return f"block_n must be 16, 32 or 64, found {config.block_n}"
    if config.warps not in (1, 2, 4, 8, 16) or config.steps_in_flight not in (1, 2, 4):
        return (
            f"warps must be a power of two up to 16 and steps_in_flight 1, 2 or 4,"
            f" found {config.warps} and {config.steps_in_flight}"
        )
    if ceil_div(K // K_STEP, config.warps) > MAX_WARP_STEPS:
        return f"sums of {K} inputs in {config.warps} warps may exceed 32 bits"
    return None
