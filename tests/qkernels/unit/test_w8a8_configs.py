"""Default W8A8 configs: near the best measured, and always able to run."""

from dataclasses import replace

import pytest

from qkernels.gpu.config import ceil_div
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.w8a8.config import default_sm90_config, default_w8a8_triton_config, fitted

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
H200_SMS = 132
SLACK = 1.03  # a choice that was measured this close to the best is as good

# shape -> M -> (block_m, block_n, split) -> us on an H200, x rounded, cold weights, in one CUDA
# graph
TRITON = {
    "qkv": {
        1: {(16, 64, 1): 10.3},
        64: {(64, 64, 1): 11.4},
        128: {(128, 64, 1): 14.5},
        1024: {(128, 256, 1): 63.9},
    },
    "o": {
        1: {(16, 64, 1): 9.0},
        256: {(128, 64, 1): 15.1},
        512: {(128, 128, 1): 21.9},
        4096: {(128, 256, 1): 132},
    },
    "gate_up": {
        1: {(16, 128, 1): 31.9},
        64: {(64, 128, 1): 35.7},
        128: {(128, 256, 1): 40.0},
        4096: {(128, 256, 1): 797},
    },
    "down": {
        1: {(16, 64, 4): 20.5},
        32: {(32, 64, 4): 23.6},
        64: {(64, 64, 2): 26.4},
        128: {(128, 64, 4): 34.3},
    },
}

# shape -> M -> (consumers, rows stored by each, block_b, split, blocks per SM, weight is A) -> us,
# as above up to 128 rows; from 256 rows on without the rounding
SM90 = {
    "qkv": {
        1: {(2, 64, 16, 1, 1, True): 9.6, (1, 64, 16, 1, 1, True): 10.7},
        16: {(2, 64, 16, 1, 1, True): 10.0, (1, 64, 16, 1, 1, True): 9.7},
        32: {(2, 64, 32, 1, 1, True): 10.3, (1, 64, 32, 1, 1, True): 9.2},
        64: {(2, 64, 64, 1, 1, True): 11.0, (1, 64, 64, 1, 1, True): 9.8}
        | {(1, 48, 64, 1, 1, True): 9.5},
        128: {(1, 64, 128, 1, 1, True): 11.1, (1, 48, 128, 1, 1, True): 10.5},
        256: {(1, 64, 128, 1, 1, True): 15.7, (2, 64, 128, 1, 1, True): 14.1}
        | {(2, 64, 256, 1, 1, True): 22.9},
        1024: {(2, 64, 128, 1, 1, True): 37.5, (2, 64, 256, 1, 1, True): 45.0}
        | {(2, 128, 128, 1, 1, False): 44.5, (3, 64, 256, 1, 1, True): 35.4},
    },
    "o": {
        1: {(2, 64, 16, 1, 1, True): 8.4, (1, 64, 16, 1, 1, True): 8.1}
        | {(1, 64, 16, 4, 2, True): 7.7},
        16: {(2, 64, 16, 1, 1, True): 8.5, (1, 64, 16, 1, 1, True): 9.2}
        | {(1, 64, 16, 4, 2, True): 7.8},
        32: {(2, 64, 32, 1, 1, True): 8.7, (1, 64, 32, 1, 1, True): 8.3},
        64: {(2, 64, 64, 1, 1, True): 9.2, (1, 64, 64, 1, 1, True): 7.9}
        | {(1, 32, 64, 1, 1, True): 8.4},
        128: {(1, 64, 128, 1, 1, True): 10.5, (1, 64, 128, 2, 1, True): 9.6}
        | {(1, 32, 128, 1, 1, True): 9.3},
        256: {(1, 64, 128, 1, 1, True): 9.8, (2, 64, 128, 1, 1, True): 12.8}
        | {(2, 64, 256, 1, 1, True): 22.3},
    },
    "gate_up": {
        1: {(2, 64, 16, 1, 1, True): 33.5, (1, 64, 16, 1, 1, True): 34.6}
        | {(2, 64, 16, 1, 2, True): 31.8},
        16: {(2, 64, 16, 1, 1, True): 33.3, (2, 64, 16, 1, 2, True): 32.0},
        32: {(2, 64, 32, 1, 1, True): 32.6, (1, 64, 32, 1, 2, True): 32.0},
        64: {(2, 64, 64, 1, 1, True): 33.3, (1, 64, 64, 1, 1, True): 34.9}
        | {(1, 64, 64, 1, 2, True): 33.6},
        128: {(1, 64, 128, 1, 1, True): 39.4, (2, 64, 128, 1, 1, True): 37.5},
        256: {(1, 64, 128, 1, 1, True): 58.7, (2, 64, 128, 1, 1, True): 54.3}
        | {(2, 64, 256, 1, 1, True): 52.3},
        1024: {(2, 64, 128, 1, 1, True): 168, (2, 64, 256, 1, 1, True): 164}
        | {(2, 128, 128, 1, 1, False): 157, (3, 64, 256, 1, 1, True): 180},
    },
    "down": {
        1: {(1, 64, 16, 1, 1, True): 19.4, (1, 64, 16, 4, 2, True): 19.6},
        16: {(2, 64, 16, 1, 1, True): 20.8, (1, 64, 16, 1, 1, True): 20.1}
        | {(1, 64, 16, 4, 2, True): 20.2},
        32: {(2, 64, 32, 1, 1, True): 22.4, (1, 64, 32, 1, 1, True): 20.5},
        64: {(2, 64, 64, 1, 1, True): 25.1, (1, 64, 64, 1, 1, True): 20.5},
        128: {(1, 64, 128, 2, 1, True): 23.4},
        256: {(1, 64, 128, 1, 1, True): 28.2, (2, 64, 128, 1, 1, True): 37.4},
        1024: {(2, 64, 128, 1, 1, True): 78.6, (2, 64, 256, 1, 1, True): 73.3}
        | {(2, 128, 128, 1, 1, False): 72.7, (3, 64, 256, 1, 1, True): 109},
    },
}


def check_near_best(config, key, times):
    """A choice that is not in the table must be measured first."""
    assert key in times, f"no time of {config}, only of {times}"
    assert times[key] <= SLACK * min(times.values()), f"{config}, of {times}"


@pytest.mark.parametrize("shape, M", [(shape, M) for shape in TRITON for M in TRITON[shape]])
def test_triton_choice_is_near_best_measured(shape, M):
    config = default_w8a8_triton_config(M, *SHAPES[shape], H200_SMS)
    check_near_best(config, (config.block_m, config.block_n, config.split), TRITON[shape][M])


@pytest.mark.parametrize("shape, M", [(shape, M) for shape in SM90 for M in SM90[shape]])
def test_sm90_choice_is_near_best_measured(shape, M):
    config = default_sm90_config(M, *SHAPES[shape], H200_SMS)
    size = config.num_consumers, config.stored_rows, config.block_b
    key = (*size, config.split, config.blocks_per_sm, config.weight_is_a)
    check_near_best(config, key, SM90[shape][M])


def test_two_splits_share_the_reduction():
    """down at 128 rows takes 23.4 us with a reduce-scatter, 25.5 where the last arriver reduces."""
    config = default_sm90_config(128, *SHAPES["down"], H200_SMS)
    assert config.split == 2 and config.reduce_scatter


def test_idle_rows_used_on_free_sms_if_measured_faster():
    def outputs(M, N, K=4096, sms=H200_SMS, kind="int"):
        tile = default_sm90_config(M, N, K, sms, kind)
        return tile.stored_rows if tile.num_consumers == 1 and tile.split == 1 else None

    assert [outputs(M, 6144) for M in (56, 57, 64, 65, 128)] == [64, 48, 48, 48, 48]
    assert [outputs(M, 4096) for M in (57, 64, 97, 128)] == [64, 64, 32, 32]
    assert outputs(65, 4096) is None, "split with a reduce-scatter"
    # 48 does not divide it; no SM is free; a longer K, a shorter one
    assert outputs(64, 6080) == 64 and outputs(64, 6144, sms=114) == 64
    assert outputs(64, 6144, K=8192) == outputs(64, 6144, K=3968) == 64
    assert default_sm90_config(64, 6144, 4096, H200_SMS, "float").idle_rows == 0


@pytest.mark.parametrize("kind", ["int", "float", "blocks"])
@pytest.mark.parametrize("sm_count", [78, 114, 132])
@pytest.mark.parametrize("N", [8, 1000, 6144, 151936])
def test_every_sm90_default_fits(N, sm_count, kind):
    for M in (1, 3, 16, 17, 33, 64, 65, 200, 1025, 70000):
        for K in (32, 4096, 14336, 2**15):
            tile = default_sm90_config(M, N, K, sm_count, kind)
            assert tile.fits(M, N, sm_count)
            # splits that reduce-scatter wait for each other, so all must be resident
            if tile.reduce_scatter:
                assert tile.split * tile.tiles(M, N) <= sm_count * tile.blocks_per_sm
                assert tile.stored_columns % 8 == 0 and tile.split <= ceil_div(K, 128)
            stages = tile.stages * (tile.block_a + tile.block_b) * 128
            stores = (
                tile.num_consumers * tile.store_stages * tile.consumer_rows * tile.store_width * 2
            )
            factors = tile.num_consumers * tile.num_column_vectors * tile.stored_columns * 4
            shared = stages + stores + 16 * tile.stages + factors * tile.column_vectors_in_shared
            # the system takes 1 KB for each block
            assert tile.stages >= 3 and tile.blocks_per_sm * (shared + 1024) <= 228 * 1024
            # registers of the block's warpgroups, and of consumers after setmaxnreg
            threads = (tile.num_consumers + 1) * 128
            assert tile.blocks_per_sm * threads * tile.registers <= 65536
            assert tile.registers % 8 == 0
            assert 1 <= tile.prefetch_stages <= tile.stages
            sums = tile.consumer_rows * tile.block_b // 128 * (2 if tile.promotion_steps else 1)
            # a thread's factors, loaded before the product
            factors = 4 if tile.column_vectors_in_shared else tile.stored_columns // 4
            assert sums + factors + 24 <= tile.consumer_registers, tile
            assert (
                tile.num_consumers * tile.consumer_registers + 24
                <= (tile.num_consumers + 1) * tile.registers
            )
            assert sums + 24 <= tile.consumer_registers <= 240
            assert (tile.promotion_steps == 0) == (kind == "int")
            # a tile of idle rows has an SM of its own
            assert tile.idle_rows == 0 or tile.tiles(M, N) <= sm_count
            # blocks: a warpgroup's rows, or a tile's columns, lie in one block of the weight
            assert kind != "blocks" or (tile.promotion_steps == 1 and tile.block_b <= 128)
            assert kind != "blocks" or tile.idle_rows == 0


@pytest.mark.parametrize("integers", [True, False], ids=["int8", "float8"])
@pytest.mark.parametrize("sm_count", [4, 108, 132])
@pytest.mark.parametrize("N", [8, 64, 1000, 6144, 151936])
def test_every_triton_default_fits(N, sm_count, integers):
    for M in (1, 3, 16, 17, 33, 64, 65, 200, 257, 8192):
        for K in (32, 96, 1024, 14336):
            tile = default_w8a8_triton_config(M, N, K, sm_count, integers)
            stage = (tile.block_m + tile.block_n) * tile.block_k
            assert tile.stages * stage <= 200 * 1024
            assert tile.split <= ceil_div(K, tile.block_k), "a split without a step"
            if tile.split > 1:
                assert tile.split * M * N <= WORKSPACE_FLOATS
                assert ceil_div(N, tile.block_n) * ceil_div(M, tile.block_m) <= WORKSPACE_COUNTERS


def test_configs_fit_a_smaller_shared_memory():
    """An H200's choices stay; those of a GPU with 99 KB keep their shape and lose stages."""
    for M in (1, 64, 128, 256, 1024, 4096):
        for N, K in SHAPES.values():
            for integers in (True, False):
                tile = default_w8a8_triton_config(M, N, K, H200_SMS, integers)
                assert fitted(tile, 227 * 1024) == tile
                small = fitted(tile, 99 * 1024)
                assert replace(small, stages=tile.stages) == tile and small.stages >= 2
                assert small.stages * (tile.block_m + tile.block_n) * tile.block_k < 99 * 1024
