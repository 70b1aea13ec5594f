"""Default W8A8 configs: what each must satisfy, and the measured ones by value."""

from dataclasses import replace

import pytest

from qkernels.gpu.config import ceil_div
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.w8a8.config import default_sm90_config, default_w8a8_triton_config, fitted

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
H200_SMS = 132


# shape -> M -> (block_m, block_n, split): the settings whose times stand in w8a8/config.py
MEASURED_INT8 = {
    "qkv": {16: (16, 64, 1), 64: (64, 64, 1), 128: (128, 64, 1), 1024: (128, 256, 1)},
    "o": {1: (16, 64, 1), 256: (128, 64, 1), 512: (128, 128, 1), 4096: (128, 256, 1)},
    "gate_up": {1: (16, 128, 1), 64: (64, 128, 1), 128: (128, 256, 1), 4096: (128, 256, 1)},
    "down": {1: (16, 64, 4), 32: (32, 64, 4), 64: (64, 64, 2), 128: (128, 64, 4)},
}


@pytest.mark.parametrize("shape, M", [(s, M) for s in MEASURED_INT8 for M in MEASURED_INT8[s]])
def test_the_measured_triton_configs(shape, M):
    tile = default_w8a8_triton_config(M, *SHAPES[shape], H200_SMS)
    assert (tile.block_m, tile.block_n, tile.split) == MEASURED_INT8[shape][M]


# (consumers, outputs or rows of x of each, block_b, split, blocks per SM, weight is A)
MEASURED_SM90 = {
    "qkv": {
        **{1: (2, 64, 16, 1, 1, True), 16: (1, 64, 16, 1, 1, True), 64: (1, 48, 64, 1, 1, True)},
        **{128: (1, 48, 128, 1, 1, True), 256: (2, 64, 128, 1, 1, True)},
        **{1024: (3, 64, 256, 1, 1, True), 4096: (2, 128, 128, 1, 1, False)},
    },
    "o": {
        **{1: (1, 64, 16, 4, 2, True), 32: (1, 64, 32, 1, 1, True)},
        **{128: (1, 32, 128, 1, 1, True), 256: (1, 64, 128, 1, 1, True)},
    },
    "gate_up": {
        **{1: (2, 64, 16, 1, 2, True), 32: (1, 64, 32, 1, 2, True), 64: (2, 64, 64, 1, 1, True)},
        **{128: (2, 64, 128, 1, 1, True), 256: (2, 64, 256, 1, 1, True)},
        **{1024: (2, 128, 128, 1, 1, False)},
    },
    "down": {
        **{1: (1, 64, 16, 4, 2, True), 64: (1, 64, 64, 1, 1, True)},
        **{128: (1, 64, 128, 2, 1, True), 256: (1, 64, 128, 1, 1, True)},
        **{1024: (2, 128, 128, 1, 1, False)},
    },
}


@pytest.mark.parametrize(
    "shape, M", [(shape, M) for shape in MEASURED_SM90 for M in MEASURED_SM90[shape]]
)
def test_the_measured_sm90_configs(shape, M):
    tile = default_sm90_config(M, *SHAPES[shape], H200_SMS)
    found = (tile.num_consumers, tile.stored_rows, tile.block_b, tile.split, tile.blocks_per_sm)
    assert (*found, tile.weight_is_a) == MEASURED_SM90[shape][M]
    assert tile.reduce_scatter == (tile.split == 2)


def test_idle_rows_are_for_free_sms_where_that_was_measured():
    def outputs(M, N, K=4096, sms=H200_SMS, kind="int"):
        tile = default_sm90_config(M, N, K, sms, kind)
        return tile.stored_rows if tile.num_consumers == 1 and tile.split == 1 else None

    assert [outputs(M, 6144) for M in (56, 57, 64, 65, 128)] == [64, 48, 48, 48, 48]
    assert [outputs(M, 4096) for M in (57, 64, 97, 128)] == [64, 64, 32, 32]
    assert outputs(65, 4096) is None, "split with a reduce-scatter"
    # 48 does not divide it; no SM is free; a longer K, a shorter one
    assert outputs(64, 6080) == 64 and outputs(64, 6144, sms=114) == 64
    assert outputs(64, 6144, K=8192) == outputs(64, 6144, K=3968) == 64
    for kind in ("asymmetric", "float"):
        assert default_sm90_config(64, 6144, 4096, H200_SMS, kind).idle_rows == 0


@pytest.mark.parametrize("kind", ["int", "asymmetric", "float", "blocks"])
@pytest.mark.parametrize("sm_count", [78, 114, 132])
@pytest.mark.parametrize("N", [8, 1000, 6144, 151936])
def test_every_sm90_default_fits(N, sm_count, kind):
    for M in (1, 3, 16, 17, 33, 64, 65, 200, 1025, 70000):
        for K in (32, 4096, 14336, 2**15):
            tile = default_sm90_config(M, N, K, sm_count, kind)
            assert tile.fits(M, N, sm_count)
            # splits that reduce-scatter wait for each other, so all must run at once
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
            assert (tile.promotion_steps == 0) == (kind in ("int", "asymmetric"))
            assert kind != "asymmetric" or tile.num_consumers < 3
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
