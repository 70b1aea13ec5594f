"""Some rows more than whole tiles have: sm90_large_m takes the tiles, sm90_small_m the rest.

Tiles of one more row may be one more wave of the GPU: of 1024 rows of 4096 outputs all tiles run at
once, of 1088 some wait for the others. Prompts are often powers of two, and decodes run beside
them. Plain Python. Legend: M rows of x, N outputs, K inputs.
"""

import functools

from qkernels.wna16.sm90_large_m_config import default_large_m_config, large_m_time, other_time
from qkernels.wna16.sm90_small_m_config import SMALL_M_ROWS

TILE_ROWS = 128
# Microseconds of sm90_small_m with 64 rows: 12.8, 10.1, 34.5, 20.9 for qkv, o, gate_up, down of an
# 8B model on an H200.
_TAIL_START_TIME = 5.5
_TAIL_WEIGHTS = 4e6  # a microsecond
_WORTH = 0.95  # of the time of one kernel: less is left to the error of these numbers


@functools.lru_cache(maxsize=2**14)
def rows_of_tiles(M: int, N: int, K: int, group: int, bits: int, sm_count: int) -> int | None:
    """The rows that sm90_large_m should take, and sm90_small_m the rest; None: one kernel, all."""
    rest = M % TILE_ROWS
    rows = M - rest
    if bits != 4 or not rows or not 0 < rest <= SMALL_M_ROWS[-1]:
        return None
    sizes = N, K, group, bits, sm_count
    tiles = default_large_m_config(rows, *sizes)
    if tiles is None:
        return None
    whole = default_large_m_config(M, *sizes)
    alone = other_time(M, *sizes) if whole is None else large_m_time(whole, M, N, K)
    apart = large_m_time(tiles, rows, N, K) + _TAIL_START_TIME + N * K / _TAIL_WEIGHTS
    return rows if apart < _WORTH * alone else None
