"""Configs of the Triton kernel of W4A16: near the best measured, and always able to run."""

import pytest

from qkernels.gpu.config import ceil_div
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.w8a8.config import default_sm90_config
from qkernels.wna16.layout import k_step, padded_n
from qkernels.wna16.sm90_large_m_config import default_large_m_config
from qkernels.wna16.sm90_small_m_config import default_small_m_config
from qkernels.wna16.triton_config import MAX_FUSED_ROWS, default_triton_config

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
H200_SMS = 132

# shape -> M -> (block_m, block_n, split) -> us on an H200, bf16, group 128, cold weights, calls in
# one CUDA graph
MEASURED = {
    "qkv": {
        1: {(16, 64, 8): 7.4},
        16: {(16, 64, 8): 8.2, (16, 64, 4): 8.6},
        32: {(32, 64, 4): 10.7},
        64: {(64, 64, 4): 12.4},
        128: {(64, 64, 2): 18.1},
        256: {(128, 64, 1): 26.1},
        1024: {(128, 64, 1): 77.9},
    },
    "o": {
        1: {(16, 64, 10): 6.3},
        16: {(16, 64, 10): 7.0},
        32: {(32, 64, 8): 8.4},
        64: {(64, 64, 6): 11.3},
        128: {(64, 64, 3): 14.6},
        256: {(128, 64, 2): 20.7},
        1024: {(128, 64, 1): 52.0},
    },
    "gate_up": {
        1: {(16, 64, 2): 23.3},
        16: {(16, 64, 2): 23.5},
        32: {(32, 64, 1): 29.9},
        64: {(64, 128, 1): 34.1},
        128: {(128, 64, 1): 53.1},
        256: {(128, 64, 1): 110},
        1024: {(128, 64, 1): 407},
    },
    "down": {
        1: {(16, 64, 8): 14.5, (16, 64, 10): 13.6, (16, 64, 12): 17.0},
        16: {(16, 64, 10): 13.9},
        32: {(32, 64, 8): 16.4},
        64: {(64, 64, 6): 22.5},
        128: {(128, 64, 4): 32.7},
        256: {(128, 64, 2): 51.6},
        1024: {(128, 64, 1): 190},
    },
}
SLACK = 1.03  # a choice that was measured this close to the best is as good


@pytest.mark.parametrize("shape, M", [(shape, M) for shape in MEASURED for M in MEASURED[shape]])
def test_choice_is_near_best_measured(shape, M):
    """A choice that is not in the table must be measured first."""
    config = default_triton_config(M, *SHAPES[shape], 128, H200_SMS)
    times = MEASURED[shape][M]
    chosen = times.get((config.block_m, config.block_n, config.split))
    assert chosen is not None, f"{shape} at {M} rows: no time of {config}, only of {times}"
    assert chosen <= SLACK * min(times.values()), f"{shape} at {M} rows: {config}, of {times}"


def test_tile_has_few_padding_rows():
    """With a tile of 128 rows, a product of 1 row would mostly read and multiply zeros."""
    for N, K in SHAPES.values():
        sizes = [default_triton_config(M, N, K, 128, H200_SMS).block_m for M in (1, 16, 17, 32, 64)]
        assert sizes == [16, 16, 32, 32, 64]


@pytest.mark.parametrize("sm_count", [4, 108, 132])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 14336])
@pytest.mark.parametrize("N", [8, 64, 1000, 6144, 151936])
def test_every_choice_fits_workspace(N, group, sm_count):
    for M in (1, 3, 16, 17, 33, 64, 65, 200, MAX_FUSED_ROWS):
        for K in (group, 2 * group, 14336 // group * group):
            tile = default_triton_config(M, N, K, group, sm_count)
            assert padded_n(N) % tile.block_n == 0
            assert tile.split <= K // k_step(group), "a part without a step"
            if tile.split > 1:
                assert tile.split * M * N <= WORKSPACE_FLOATS
                tiles = padded_n(N) // tile.block_n * ceil_div(M, tile.block_m)
                assert tiles <= WORKSPACE_COUNTERS


def test_many_rows_use_library_product():
    assert default_triton_config(MAX_FUSED_ROWS, 4096, 4096, 128, H200_SMS) is not None
    assert default_triton_config(MAX_FUSED_ROWS + 1, 4096, 4096, 128, H200_SMS) is None


@pytest.mark.parametrize(
    "group, block_k",
    [(32, 32), (64, 64), (96, 32), (128, 128), (256, 128), (14336, 128), (160, 32)],
)
def test_k_step_lies_in_one_group(group, block_k):
    assert k_step(group) == block_k
    assert group % block_k == 0


@pytest.mark.parametrize(
    "config",
    [
        default_small_m_config(8, 4096, 4096, 128, 4, H200_SMS),
        default_large_m_config(512, 4096, 4096, 128, 4, H200_SMS),
        default_sm90_config(16, 4096, 4096, H200_SMS),
    ],
    ids=lambda config: type(config).__name__,
)
def test_compile_key_includes_derived_constants(config, monkeypatch):
    """Triton's disk cache outlives a version; a key of fields alone would find the old kernel."""
    before = config.cache_key
    assert "registers" in before and str(config) in before
    monkeypatch.setattr(type(config), "registers", property(lambda self: 1))
    assert config.cache_key != before
