"""Configs of the integer tensor core GEMV of up to 4 rows. Plain Python.

Legend and microseconds as in triton_config.py.
"""

import functools
from dataclasses import dataclass

from qkernels.gpu.config import MAX_STAGES, ceil_div
from qkernels.operands.limbs import (
    K_STEP,
    LIMBS_COLUMNS,
    LIMBS_MAX_ROWS,
    LIMBS_OF_INPUT,
)
from qkernels.wna16.layout import k_step


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvImmaConfig:
    """How one product of few rows is cut for the integer tensor core (sm90_gemv_imma.py)."""

    block_n: int = 16  # 16, 32 or 64
    warps: int = 8  # of a block, each with its own steps
    ahead: int = 2  # steps that a warp asks for at once


def limbs_pay(M: int, N: int, K: int) -> bool:
    """Whether 4 bits gain by limbs that have to be made first, by a kernel of their own.

    Measured, us for qkv / o / gate_up / down, in brackets the ring, which takes x as it is:
    M = 1  5.8 (6.4) / 4.8 (5.1) / 18.1 (18.4) / 11.0 to 11.8 (10.5), 128256 x 4096 65 (78)
    M = 4  7.0 (6.3) / 5.1 (5.2) / 18.9 (18.5) / 12.3 (10.5)
    """
    return N * K > 2**27 or (M <= 2 and K // K_STEP <= 64)


# Measured, us for qkv / o / gate_up / down, in brackets the portable body:
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
    """The tile for few rows; None: there are more, or a step lies in several groups."""
    if M > LIMBS_MAX_ROWS or k_step(group) != K_STEP:
        return None
    steps = K // K_STEP
    # a block reads all limbs: where there are many blocks, fewer and larger ones
    wide = M > LIMBS_COLUMNS // LIMBS_OF_INPUT and 2.5 * sm_count < N / 16
    if bits == 8:  # a step is twice as many bytes
        warps, ahead = 16 if steps > 64 else 8, 1
    else:
        warps = 4 if wide else 8
        ahead = min(2, ceil_div(steps, warps))
    return GemvImmaConfig(block_n=32 if wide else 16, warps=warps, ahead=ahead)


def gemv_config_fault(
    tile: GemvImmaConfig, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """None: the kernel can run it."""
    if M > LIMBS_MAX_ROWS or bits not in (4, 8):
        return f"takes at most {LIMBS_MAX_ROWS} rows and 4 or 8 bits, found {M} and {bits}"
    if k_step(group) != K_STEP:
        return f"takes groups divisible by {K_STEP}, found {group} of {K} inputs"
    if tile.block_n not in (16, 32, 64):
        return f"block_n must be 16, 32 or 64, found {tile.block_n}"
    if tile.warps not in (1, 2, 4, 8, 16) or not 1 <= tile.ahead <= MAX_STAGES:
        return (
            f"warps must be a power of two up to 16 and ahead 1 to {MAX_STAGES},"
            f" found {tile.warps} and {tile.ahead}"
        )
    return None
