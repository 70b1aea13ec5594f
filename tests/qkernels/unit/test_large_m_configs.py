"""Configs of the sm_90 kernel for many rows: near the best measured, and always able to run."""

import pytest

from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.wna16.sm90_large_m_config import LargeMConfig, default_large_m_config

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
H200_SMS = 132
SHARED_MEMORY = 227 * 1024
TILES = [(2, 64), (2, 128), (3, 128), (2, 256)]
both_bits = pytest.mark.parametrize("bits", [4, 8])

OTHER = "another variant"

# bits -> shape -> M -> (consumer warpgroups, block_m, split, whether the tail is split) or OTHER ->
# us on an H200, bf16, group 128, cold weights, calls in one CUDA graph
MEASURED = {
    4: {
        "qkv": {
            64: {OTHER: 12.8, (3, 128, 4, False): 13.3},
            128: {(3, 128, 4, False): 16.4, OTHER: 17.9},
            256: {(3, 128, 2, False): 23.2, OTHER: 26.9},
            512: {(3, 128, 1, False): 37.0},
            1024: {(2, 256, 1, True): 68.9, OTHER: 80.4},
            4096: {(2, 256, 1, False): 304.6},
        },
        "o": {
            64: {(2, 64, 4, False): 10.1, OTHER: 11.9},
            128: {(2, 128, 4, False): 12.2, OTHER: 14.3},
            256: {(2, 128, 2, False): 17.0, OTHER: 21.2, (2, 128, 4, False): 18.8},
            512: {(2, 128, 1, False): 26.4, OTHER: 27.5},
            1024: {(2, 256, 1, False): 43.8},
            4096: {(2, 256, 1, False): 203.8},
        },
        "gate_up": {
            64: {OTHER: 34.5, (2, 64, 1, False): 38.8},
            128: {(2, 128, 1, False): 50.8, OTHER: 56.9},
            256: {(2, 256, 1, False): 86.0},
            512: {(2, 256, 1, True): 158.1},
            1024: {(2, 256, 1, False): 302.3},
            4096: {(2, 256, 1, True): 1392},
        },
        "down": {
            64: {(2, 64, 4, False): 21.4, OTHER: 22.4},
            128: {(2, 128, 4, False): 26.9, OTHER: 33.3},
            256: {(2, 256, 4, False): 44.0, OTHER: 53.4},
            512: {(2, 256, 2, False): 78.7, OTHER: 94.2},
            1024: {(2, 256, 1, False): 144.5},
            4096: {(2, 256, 1, False): 689},
        },
    },
    8: {
        "qkv": {
            64: {OTHER: 14.8},
            128: {(3, 128, 4, False): 18.5, OTHER: 22.5},
            256: {(3, 128, 2, False): 25.3, OTHER: 32.0},
            512: {(3, 128, 1, False): 40.5, OTHER: 63.0},
        },
        "o": {
            64: {(2, 64, 4, False): 12.0},
            128: {(2, 128, 4, False): 13.3, OTHER: 16.9},
            256: {(2, 128, 2, False): 18.7, OTHER: 23.7},
            512: {(2, 128, 1, False): 28.3, OTHER: 32.8},
        },
        "gate_up": {
            64: {(2, 64, 1, False): 45.7, OTHER: 49.0},
            128: {(2, 128, 1, False): 57.6, OTHER: 68.7},
            256: {(2, 256, 1, False): 90.2, OTHER: 136.3},
            512: {(2, 256, 1, True): 172.0, OTHER: 253.2},
        },
        "down": {
            64: {(2, 64, 4, False): 26.6, OTHER: 28.1},
            128: {(2, 128, 4, False): 31.3, OTHER: 38.6},
            256: {(2, 256, 4, False): 47.3, OTHER: 62.1},
            512: {(2, 256, 2, False): 82.4, OTHER: 111.7},
        },
    },
}
SLACK = 1.03  # a choice that was measured this close to the best is as good


@pytest.mark.parametrize("shape", SHAPES)
@both_bits
def test_choice_is_near_best_measured(shape, bits):
    """A choice that is not in the table must be measured first."""
    for M, times in MEASURED[bits][shape].items():
        config = default_large_m_config(M, *SHAPES[shape], 128, bits, H200_SMS)
        key = OTHER
        if config is not None:
            key = (config.num_consumers, config.block_m, config.split, config.tail_split)
        assert key in times, f"{shape} at {M} rows: no time of {config}, only of {times}"
        assert times[key] <= SLACK * min(times.values()), f"{shape} at {M} rows: {config}"
        assert config is None or config.bits == bits


@pytest.mark.parametrize("sm_count", [4, 114, 132])
@pytest.mark.parametrize("K", [128, 384, 4096, 14336])
@pytest.mark.parametrize("N", [8, 72, 1000, 6144, 151936])
@both_bits
def test_every_choice_is_valid(N, K, sm_count, bits):
    for M in (33, 64, 65, 200, 257, 1000, 4096):
        tile = default_large_m_config(M, N, K, 128, bits, sm_count)
        if tile is None:
            continue
        units = tile.tiles(M, N) * tile.split
        assert 1 <= tile.blocks <= sm_count
        assert tile.fits(M, N, K)
        if tile.split > 1:
            # parts wait for each other: each needs a block, and a step
            assert tile.blocks == units
            assert tile.split <= K // 128
            floats = units * tile.num_consumers * 64 * tile.block_m
            assert floats <= WORKSPACE_FLOATS
            assert tile.tiles(M, N) * tile.num_consumers <= WORKSPACE_COUNTERS


@pytest.mark.parametrize("parts, block_m", TILES)
@pytest.mark.parametrize("split", [1, 2, 4])
@both_bits
def test_block_registers_and_shared_memory(parts, block_m, split, bits):
    tile = LargeMConfig(blocks=1, bits=bits, num_consumers=parts, block_m=block_m, split=split)
    # warps that copy come as four
    registers = 128 * (parts * tile.consumer_registers + tile.producer_registers)
    assert registers <= 128 * (parts + 1) * tile.registers <= 65536
    # x of so many stages, words of the steps that have begun, results on their way out
    x = 2 * block_m * 128 // tile.stages_per_step
    stored = parts * 64 * tile.store_rows * tile.store_stages * 2
    used = tile.stages * (x + 16) + tile.weight_slots * parts * 1024 * bits + stored
    assert used <= SHARED_MEMORY
    assert tile.stages >= 3 and tile.stages >= 2 * tile.stages_per_step
    assert tile.weight_slots * tile.stages_per_step >= tile.stages
    rows = block_m // split
    assert rows % tile.store_rows == 0
    # pieces take the buffers in turn, also from one tile to the next
    assert rows // tile.store_rows % tile.store_stages == 0


@pytest.mark.parametrize("parts, block_m", TILES)
def test_step_has_an_even_number_of_products(parts, block_m):
    """And more than are in flight: each has registers of its own."""
    tile = LargeMConfig(blocks=1, num_consumers=parts, block_m=block_m)
    subtiles = 128 // tile.k_subtile
    assert subtiles % 2 == 0 and subtiles > tile.mma_in_flight
    assert tile.stages_per_step == 1 or subtiles // 2 + tile.mma_in_flight <= subtiles


def test_steps_of_128_inputs_only():
    N, K = SHAPES["gate_up"]
    assert default_large_m_config(1024, N, K, 256, 4, H200_SMS) is not None
    assert default_large_m_config(1024, N, K, 64, 4, H200_SMS) is None


@both_bits
def test_few_rows_and_small_weights_use_other_kernels(bits):
    assert default_large_m_config(32, *SHAPES["down"], 128, bits, H200_SMS) is None
    assert default_large_m_config(128, 896, 896, 128, bits, H200_SMS) is None
