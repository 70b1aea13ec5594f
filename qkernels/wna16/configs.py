"""Which kernel takes a W4A16 or W8A16 problem, and with which config. Plain Python, no tensors.

Legend: M rows of x, N outputs, K inputs.
"""

from qkernels.wna16.sm90_gemv_imma_config import (
    LinearDigitsTile,
    linear_digits_pay,
    linear_digits_tile,
)
from qkernels.wna16.sm90_large_m_config import LinearHopperTile, linear_hopper_tile
from qkernels.wna16.sm90_small_m_config import LinearRingTile, linear_ring_tile
from qkernels.wna16.triton_config import LinearTile, linear_tile

# one for each body
AnyLinearTile = LinearTile | LinearDigitsTile | LinearRingTile | LinearHopperTile


def chosen_linear_tile(
    M: int,
    N: int,
    K: int,
    group: int,
    bits: int,
    sm_count: int,
    gluon: bool,
    digits_made: bool = False,
) -> AnyLinearTile | None:
    """The best body's tile; None: the library multiplies.

    `gluon`: the bodies for sm_90 run. `digits_made`: by the operation before, at no cost here.
    """
    tile = None
    if gluon:
        digits = linear_digits_tile(M, N, K, group, bits, sm_count)
        if digits is not None and (digits_made or linear_digits_pay(M, N, K)):
            return digits
        tile = linear_ring_tile(M, N, K, group, bits, sm_count) or digits
        tile = tile or linear_hopper_tile(M, N, K, group, bits, sm_count)
    return tile or linear_tile(M, N, K, group, sm_count)


def tabled_linear_tile(
    tile: AnyLinearTile | None,
    M: int,
    N: int,
    K: int,
    sm_count: int,
    gluon: bool,
) -> tuple[AnyLinearTile | None, bool]:
    """A table's tile for these rows on this GPU, and whether it can run.

    A table says nothing of the triton that is installed, and of the SMs what somebody wrote: parts
    of K that do not all run at once would wait for each other for good.
    """
    if isinstance(tile, LinearHopperTile):
        tile = tile.on(M, N, sm_count)
        return tile, gluon and tile.fits(M, N, K)
    return tile, gluon or not isinstance(tile, LinearDigitsTile | LinearRingTile)
