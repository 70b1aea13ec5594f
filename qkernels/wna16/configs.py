"""Which kernel takes a W4A16 or W8A16 problem, and with which config. Plain Python, no tensors.

Legend: M rows of x, N outputs, K inputs.
"""

from qkernels.wna16.sm90_gemv_imma_config import (
    GemvImmaConfig,
    default_gemv_config,
    limbs_pay,
)
from qkernels.wna16.sm90_large_m_config import LargeMConfig, default_large_m_config
from qkernels.wna16.sm90_small_m_config import SmallMConfig, default_small_m_config
from qkernels.wna16.triton_config import TritonGemmConfig, default_triton_config

# one for each body
WNA16Config = TritonGemmConfig | GemvImmaConfig | SmallMConfig | LargeMConfig


def default_config(
    M: int,
    N: int,
    K: int,
    group: int,
    bits: int,
    sm_count: int,
    gluon: bool,
    limbs_made: bool = False,
) -> WNA16Config | None:
    """The best body's tile; None: the library multiplies.

    `gluon`: the bodies for sm_90 run. `limbs_made`: by the operation before, at no cost here.
    """
    tile = None
    if gluon:
        limbs = default_gemv_config(M, N, K, group, bits, sm_count)
        if limbs is not None and (limbs_made or limbs_pay(M, N, K)):
            return limbs
        tile = default_small_m_config(M, N, K, group, bits, sm_count) or limbs
        tile = tile or default_large_m_config(M, N, K, group, bits, sm_count)
    return tile or default_triton_config(M, N, K, group, sm_count)


def usable_tuned_config(
    tile: WNA16Config | None,
    M: int,
    N: int,
    K: int,
    sm_count: int,
    gluon: bool,
) -> tuple[WNA16Config | None, bool]:
    """A table's tile for these rows on this GPU, and whether it can run.

    A table says nothing of the triton that is installed, and of the SMs what somebody wrote: parts
    of K that do not all run at once would wait for each other for good.
    """
    if isinstance(tile, LargeMConfig):
        tile = tile.on(M, N, sm_count)
        return tile, gluon and tile.fits(M, N, K)
    return tile, gluon or not isinstance(tile, GemvImmaConfig | SmallMConfig)
