"""Tile choices of W4A16: what every choice must satisfy, and the measured ones by value."""

import pytest

from qkernels.gpu.config import ceil_div
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.w8a8.config import W8A8Sm90Config
from qkernels.wna16.layout import k_step, padded_n
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.sm90_small_m_config import SmallMConfig
from qkernels.wna16.triton_config import MAX_FUSED_ROWS, default_triton_config

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
H200_SMS = 132


# shape -> M -> (block_m, block_n, split): the settings whose times stand in the config
MEASURED = {
    "qkv": {1: (16, 64, 8), 32: (32, 64, 4), 64: (64, 64, 4), 128: (64, 64, 2), 256: (128, 64, 1)},
    "o": {1: (16, 64, 10), 32: (32, 64, 8), 64: (64, 64, 6), 128: (64, 64, 3), 256: (128, 64, 2)},
    "gate_up": {
        **{1: (16, 64, 2), 32: (32, 64, 1), 64: (64, 128, 1), 128: (128, 64, 1)},
        **{256: (128, 64, 1), 1024: (128, 64, 1)},
    },
    "down": {
        **{1: (16, 64, 10), 32: (32, 64, 8), 64: (64, 64, 6), 128: (128, 64, 4)},
        **{256: (128, 64, 2)},
    },
}


@pytest.mark.parametrize("shape, M", [(shape, M) for shape in MEASURED for M in MEASURED[shape]])
def test_the_measured_tiles(shape, M):
    N, K = SHAPES[shape]
    tile = default_triton_config(M, N, K, 128, H200_SMS)
    assert (tile.block_m, tile.block_n, tile.split) == MEASURED[shape][M]
    assert tile.use_tma == (M > 16)


@pytest.mark.parametrize("sm_count", [4, 108, 132])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 14336])
@pytest.mark.parametrize("N", [8, 64, 1000, 6144, 151936])
def test_every_choice_fits_its_workspace(N, group, sm_count):
    for M in (1, 3, 16, 17, 33, 64, 65, 200, MAX_FUSED_ROWS):
        for K in (group, 2 * group, 14336 // group * group):
            tile = default_triton_config(M, N, K, group, sm_count)
            assert padded_n(N) % tile.block_n == 0
            assert tile.split <= K // k_step(group), "a part without a step"
            if tile.split > 1:
                assert tile.split * M * N <= WORKSPACE_FLOATS
                tiles = padded_n(N) // tile.block_n * ceil_div(M, tile.block_m)
                assert tiles <= WORKSPACE_COUNTERS


def test_many_rows_go_to_the_library():
    assert default_triton_config(MAX_FUSED_ROWS, 4096, 4096, 128, H200_SMS) is not None
    assert default_triton_config(MAX_FUSED_ROWS + 1, 4096, 4096, 128, H200_SMS) is None


@pytest.mark.parametrize(
    "group, block_k",
    [(32, 32), (64, 64), (96, 32), (128, 128), (256, 128), (14336, 128), (160, 32)],
)
def test_a_step_lies_in_one_group(group, block_k):
    assert k_step(group) == block_k
    assert group % block_k == 0


@pytest.mark.parametrize(
    "tile",
    [SmallMConfig(rows=8), LargeMConfig(blocks=1), W8A8Sm90Config(parts=1, block_right=16)],
)
def test_a_kernel_is_compiled_anew_where_a_tile_computes_otherwise(tile, monkeypatch):
    """Triton's cache on disk outlives a version: fields alone would find the old kernel."""
    before = tile.cache_key
    assert "registers" in before and str(tile) in before
    monkeypatch.setattr(type(tile), "registers", property(lambda self: 1))
    assert tile.cache_key != before
