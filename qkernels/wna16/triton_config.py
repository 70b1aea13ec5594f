"""Configs of W4A16 and W8A16 on any GPU (triton_gemm.py), in plain Python.

Legend: M rows of x, N outputs, K inputs. Times are microseconds on an H200, with bf16, group 128,
weights that are not in the L2, and calls in one CUDA graph. qkv is [6144, 4096], o [4096, 4096],
gate_up [28672, 4096], down [4096, 14336].
"""

import functools
from dataclasses import dataclass, replace

from qkernels.gpu.config import ceil_div, launch_fault, split_fault
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.wna16.layout import TILE_N, k_step, padded_n

# With more rows than this, the weight is dequantized to a scratch buffer for cuBLAS. At 1024 rows,
# qkv / o / gate_up / down take 78 / 52 / 407 / 190 us in the kernel, and 82 / 58 / 421 / 204 us by
# dequantizing and cuBLAS. At 2048 rows the kernel takes twice as long, while dequantizing still
# takes 18 / 11 / 80 / 40 us.
MAX_FUSED_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonGemmConfig:
    """Launch config of triton_gemm.py.

    The grid is [ceil(N / block_n), split, ceil(M / block_m)].
    """

    block_m: int
    block_n: int  # 64 or 128: one or two stored tiles
    split: int  # split-K
    warps: int = 4
    stages: int = 3
    use_tma: bool = False  # load x by TMA
    pdl: bool = False  # programmatic dependent launch


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearRow:
    max_m: int
    block_m: int
    max_split: int
    blocks_per_sm: int  # most blocks per SM of the split grid
    use_tma: bool = False
    pdl: bool = False
    # the row applies up to this many tiles of 64 outputs per SM, and up to this many K steps
    max_tiles_per_sm: float = float("inf")
    max_steps: float = float("inf")
    wide_from: float = float("inf")  # tiles of 128 outputs per SM from which block_n is 128


# Tried in this order. A split of 12 costs registers in the reduction: down at one row takes 13.6 us
# with split 10 and 17.0 us with split 12.
_SPLITS = (10, 8, 6, 4, 3, 2)

# Measured us of the choices for qkv / o / gate_up / down; notes/wna16.md has the alternatives:
# M = 1     7.4 / 6.3 / 23.3 / 13.6   split 8 / 10 / 2 / 10; 7 blocks fill an SM's registers
# M = 16    8.2 / 7.0 / 23.5 / 13.9   the same
# M = 32    10.7 / 8.4 / 29.9 / 16.4  split 4 / 8 / 1 / 8
# M = 64    12.4 / 11.3 / 34.1 / 22.5 split 4 / 6 / 1 / 6, gate_up block_n 128
# M = 128   18.1 / 14.6 / 53.1 / 32.7 block_m 64, split 2 / 3; block_m 128, split 1 / 4
# M = 256   26.1 / 20.7 / 110 / 51.6  block_m 128, split 1 / 2 / 1 / 2
# M = 1024  77.9 / 52.0 / 407 / 190
_LINEAR_ROWS = (
    _LinearRow(max_m=16, block_m=16, max_split=10, blocks_per_sm=7, pdl=True),
    _LinearRow(max_m=32, block_m=32, max_split=8, blocks_per_sm=4, use_tma=True, pdl=True),
    _LinearRow(
        max_m=64, block_m=64, max_split=6, blocks_per_sm=3, use_tma=True, pdl=True, wide_from=1.5
    ),
    _LinearRow(
        max_m=128,
        block_m=64,
        max_split=3,
        blocks_per_sm=3,
        use_tma=True,
        pdl=True,
        max_tiles_per_sm=1,
        max_steps=64,
    ),
    _LinearRow(max_m=128, block_m=128, max_split=4, blocks_per_sm=2, use_tma=True, pdl=True),
    _LinearRow(max_m=MAX_FUSED_ROWS, block_m=128, max_split=2, blocks_per_sm=2, use_tma=True),
)


@functools.lru_cache(maxsize=4096)
def default_triton_config(
    M: int, N: int, K: int, group: int, sm_count: int
) -> TritonGemmConfig | None:
    """Return the config for M >= 1 rows; None: dequantize, then cuBLAS."""
    N = padded_n(N)
    tiles_per_sm = N // TILE_N / sm_count
    steps = K // k_step(group)

    def is_for(row: _LinearRow) -> bool:
        return row.max_m >= M and tiles_per_sm <= row.max_tiles_per_sm and steps <= row.max_steps

    row = next(filter(is_for, _LINEAR_ROWS), None)
    if row is None:
        return None
    wide = N % 128 == 0 and row.wide_from <= tiles_per_sm / 2
    block_n = 128 if wide else TILE_N
    tiles = N // block_n * ceil_div(M, row.block_m)

    def can_split(split: int) -> bool:
        return (
            split <= min(row.max_split, steps)
            and split * tiles <= row.blocks_per_sm * sm_count
            and split * M * N <= WORKSPACE_FLOATS
            and tiles <= WORKSPACE_COUNTERS
        )

    return TritonGemmConfig(
        block_m=row.block_m,
        block_n=block_n,
        split=next(filter(can_split, _SPLITS), 1),
        use_tma=row.use_tma,
        pdl=row.pdl,
    )


def without_tma(config: TritonGemmConfig) -> TritonGemmConfig:
    """Return the config for a GPU without TMA.

    Without TMA, Triton turns a descriptor into loads that it does not pipeline. Such a GPU also has
    no wgmma, so x goes through registers, too: at 64 rows 4 warps spill up to 188 registers, 8
    warps none.
    """
    warps = max(8, config.warps) if config.block_m >= 64 else config.warps
    return replace(config, use_tma=False, warps=warps)


def triton_config_fault(
    config: TritonGemmConfig, *, M: int, N: int, K: int, group: int, bits: int
) -> str | None:
    """Return why the kernel cannot run the config; None: it can."""
    stored_n = padded_n(N)
    if config.block_n not in (TILE_N, 2 * TILE_N) or stored_n % config.block_n:
        return f"block_n must be 64 or 128 and divide {stored_n}, found {config.block_n}"
    tiles = stored_n // config.block_n * ceil_div(M, max(1, config.block_m))
    return (
        launch_fault(config.block_m, config.warps, config.stages, least=16, most=256)
        or split_fault(config.split, K // k_step(group), tiles, M * N)
    )  # fmt: skip
