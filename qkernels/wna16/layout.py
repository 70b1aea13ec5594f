"""The private layout of a packed weight: its tiles and steps. Plain Python.

Legend: N outputs, K inputs.
"""

from qkernels.gpu.config import ceil_div
from qkernels.operands.limbs import LINEAR_MAX_BLOCK_K

# The private weight layout stores tiles of this many outputs: one warpgroup's share of a wgmma.
LINEAR_TILE_N = 64
LINEAR_MIN_BLOCK_K = 32  # one row's 32 inputs fill a whole number of fragment words


def linear_block_k(group: int) -> int:
    """Inputs of one step: the largest power of two up to 128 that divides the group.

    A step then lies in one group, and its scale multiplies the accumulator.
    """
    return min(LINEAR_MAX_BLOCK_K, group & -group)


def linear_padded_n(N: int) -> int:
    return ceil_div(N, LINEAR_TILE_N) * LINEAR_TILE_N
