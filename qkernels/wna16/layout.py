"""The prepacked layout of a weight: its tiles and K steps. Plain Python.

Legend: N outputs, K inputs.
"""

from qkernels.gpu.config import ceil_div
from qkernels.operands.limbs import K_STEP

# Outputs of a stored tile: the rows of operand A of one wgmma.
TILE_N = 64
MIN_K_STEP = 32  # a row's 32 inputs are the four packed words of its four lanes


def k_step(group: int) -> int:
    """Inputs of a K step: the largest power of two up to 128 that divides the group.

    A K step then lies in one group, so one scale for each row multiplies its sums.
    """
    return min(K_STEP, group & -group)


def padded_n(N: int) -> int:
    """Outputs that are stored: whole tiles."""
    return ceil_div(N, TILE_N) * TILE_N
