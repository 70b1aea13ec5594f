"""Which body of W4A16 and W8A16 takes a problem, and in which tiles. Plain Python, no tensors.

Legend: M rows of x, N outputs, K inputs.
"""

from qkernels.tiles import LinearDigitsTile, LinearTile, linear_digits_tile, linear_tile
from qkernels.w4a16_hopper_tiles import LinearHopperTile, linear_hopper_tile


def chosen_linear_tile(
    M: int, N: int, K: int, group: int, bits: int, sm_count: int, gluon: bool
) -> LinearTile | LinearHopperTile | LinearDigitsTile | None:
    """The best body's tile; None: the library multiplies. `gluon`: the bodies for sm_90 run."""
    tile = None
    if gluon:
        tile = linear_digits_tile(M, N, K, group, bits, sm_count)
    if gluon and bits == 4:
        tile = tile or linear_hopper_tile(M, N, K, group, sm_count)
    return tile or linear_tile(M, N, K, group, sm_count)
