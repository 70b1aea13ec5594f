"""The private layout of a packed weight: its tiles and steps. Plain Python.

Legend: N outputs, K inputs.
"""

from qkernels.gpu.config import ceil_div
from qkernels.operands.limbs import K_STEP

# The private weight layout stores tiles of this many outputs: one warpgroup's share of a wgmma.
TILE_N = 64
MIN_K_STEP = 32  # one row's 32 inputs fill a whole number of fragment words


def k_step(group: int) -> int:
    """Inputs of one step: the largest power of two up to 128 that divides the group.

    A step then lies in one group, and its scale multiplies the accumulator.
    """
    return min(K_STEP, group & -group)


def padded_n(N: int) -> int:
    return ceil_div(N, TILE_N) * TILE_N
