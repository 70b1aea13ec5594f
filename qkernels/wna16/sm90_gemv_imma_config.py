"""Configs of W4A16 and W8A16 for up to 4 rows on sm_90 (sm90_gemv_imma.py), in plain Python.

Legend and times: see triton_config.py.
"""

import functools
from dataclasses import dataclass

from qkernels.gpu.config import MAX_STAGES, CompileTimeConfig, ceil_div
from qkernels.operands.limbs import (
    K_STEP,
    LIMBS_COLUMNS,
    LIMBS_MAX_ROWS,
    LIMBS_OF_INPUT,
)
from qkernels.wna16.layout import k_step


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvImmaConfig(CompileTimeConfig):
    """Launch config of sm90_gemv_imma.py."""

    block_n: int = 16  # 16, 32 or 64
    warps: int = 8  # warps per block, each with its own K steps
    steps_in_flight: int = 2  # K steps that a warp loads together


def limbs_pay(M: int, N: int, K: int) -> bool:
    """Return True if limbs are faster for 4-bit weights even if a separate kernel makes them.

    Measured, us for qkv / o / gate_up / down; in brackets sm90_small_m, which needs no limbs:

        M = 1  5.8 (6.4) / 4.8 (5.1) / 18.1 (18.4) / 11.0 to 11.8 (10.5), 128256 x 4096 65 (78)
        M = 4  7.0 (6.3) / 5.1 (5.2) / 18.9 (18.5) / 12.3 (10.5)
    """
    return N * K > 2**27 or (M <= 2 and K // K_STEP <= 64)


# Measured, us for qkv / o / gate_up / down, in brackets triton_gemm:
# M = 1         6.1 (7.7) / 5.0 (6.6) / 19.1 (23.9) / 11.3 (13.4)
# M = 2         6.3 (7.7) / 5.1 (6.6) / 18.9 (23.5) / 11.7 (13.5)
# M = 4         7.3 (7.9) / 5.4 (6.7) / 19.8 (23.5) / 12.5 (13.5)
# M = 8         10.3 (7.8) / 8.2 (6.6) / 32.5 (23.5) / 19.5 (13.7)
# M = 1, 8 bits 9.3 (10.7) / 7.4 (9.3) / 34.9 (41.0) / 18.7 (21.7)
# M = 4, 8 bits 10.9 (10.5) / 8.7 (9.5) / 36.3 (41.5) / 21.0 (21.4)
@functools.lru_cache(maxsize=4096)
def default_gemv_config(
    M: int, N: int, K: int, group: int, bits: int, sm_count: int
) -> GemvImmaConfig | None:
    """Return the config; None: M is too large, or a K step spans several groups."""
    if M > LIMBS_MAX_ROWS or k_step(group) != K_STEP:
        return None
    steps = K // K_STEP
    # every block reads all limbs, so use fewer and larger blocks if there would be many
    wide = M > LIMBS_COLUMNS // LIMBS_OF_INPUT and 2.5 * sm_count < N / 16
    if bits == 8:  # a K step has twice the bytes
        warps, steps_in_flight = 16 if steps > 64 else 8, 1
    else:
        warps = 4 if wide else 8
        steps_in_flight = min(2, ceil_div(steps, warps))
    return GemvImmaConfig(block_n=32 if wide else 16, warps=warps, steps_in_flight=steps_in_flight)


def gemv_config_fault(
    config: GemvImmaConfig, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """Return why the kernel cannot run the config; None: it can."""
    if M > LIMBS_MAX_ROWS or bits not in (4, 8):
        return f"takes at most {LIMBS_MAX_ROWS} rows and 4 or 8 bits, found {M} and {bits}"
    if k_step(group) != K_STEP:
        return f"takes groups divisible by {K_STEP}, found {group} of {K} inputs"
    if config.block_n not in (16, 32, 64):
        return f"block_n must be 16, 32 or 64, found {config.block_n}"
    if config.warps not in (1, 2, 4, 8, 16) or not 1 <= config.steps_in_flight <= MAX_STAGES:
        return (
            f"warps must be a power of two up to 16 and steps_in_flight 1 to {MAX_STAGES},"
            f" found {config.warps} and {config.steps_in_flight}"
        )
    return None
