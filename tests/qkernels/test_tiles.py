"""Tile choices: what every choice must satisfy, and the measured ones by value."""

from dataclasses import replace

import pytest

from qkernels.attention_tiles import (
    ATTENTION_MAX_SPLIT,
    CHUNK_MAX_SPLIT,
    attention_tile,
    chunk_split,
)
from qkernels.int8_tiles import fitted, int8_hopper_tile, int8_tile
from qkernels.tiles import (
    LINEAR_COUNTERS,
    LINEAR_MAX_ROWS,
    LINEAR_WORKSPACE_FLOATS,
    ceil_div,
    linear_block_k,
    linear_hopper_tile,
    linear_padded_n,
    linear_tile,
    power_of_two,
)

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
H200_SMS = 132


# shape -> M -> (block_m, block_n, split): the settings whose times stand in tiles.py
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
    tile = linear_tile(M, N, K, 128, H200_SMS)
    assert (tile.block_m, tile.block_n, tile.split) == MEASURED[shape][M]
    assert tile.bulk == (M > 16)


@pytest.mark.parametrize("sm_count", [4, 108, 132])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 14336])
@pytest.mark.parametrize("N", [8, 64, 1000, 6144, 151936])
def test_every_choice_fits_its_workspace(N, group, sm_count):
    for M in (1, 3, 16, 17, 33, 64, 65, 200, LINEAR_MAX_ROWS):
        for K in (group, 2 * group, 14336 // group * group):
            tile = linear_tile(M, N, K, group, sm_count)
            assert linear_padded_n(N) % tile.block_n == 0
            assert tile.split <= K // linear_block_k(group), "a part without a step"
            if tile.split > 1:
                assert tile.split * M * N <= LINEAR_WORKSPACE_FLOATS
                tiles = linear_padded_n(N) // tile.block_n * ceil_div(M, tile.block_m)
                assert tiles <= LINEAR_COUNTERS


# shape -> M -> whether the Hopper body was the fastest of ours
MEASURED_LINEAR_HOPPER = {
    "qkv": {128: False, 256: False, 512: True, 1024: False, 4096: True},
    "o": {128: False, 256: False, 512: False, 1024: True, 4096: True},
    "gate_up": {128: False, 256: True, 512: True, 1024: True, 4096: True},
    "down": {128: False, 256: False, 512: False, 1024: True, 4096: True},
}


@pytest.mark.parametrize(
    "shape, M", [(s, M) for s in MEASURED_LINEAR_HOPPER for M in MEASURED_LINEAR_HOPPER[s]]
)
def test_the_measured_choices_of_the_hopper_body(shape, M):
    N, K = SHAPES[shape]
    tile = linear_hopper_tile(M, N, K, 128, H200_SMS)
    assert (tile is not None) == MEASURED_LINEAR_HOPPER[shape][M]
    if tile is not None:
        tiles = ceil_div(N, tile.block_n) * ceil_div(M, tile.block_m)
        assert tile.blocks == min(tiles, H200_SMS)


def test_the_hopper_body_takes_steps_of_128_inputs_only():
    N, K = SHAPES["gate_up"]
    assert linear_hopper_tile(1024, N, K, 256, H200_SMS) is not None
    assert linear_hopper_tile(1024, N, K, 64, H200_SMS) is None


def test_many_rows_go_to_the_library():
    assert linear_tile(LINEAR_MAX_ROWS, 4096, 4096, 128, H200_SMS) is not None
    assert linear_tile(LINEAR_MAX_ROWS + 1, 4096, 4096, 128, H200_SMS) is None


# shape -> M -> (block_m, block_n, split): the settings whose times stand in tiles.py
MEASURED_INT8 = {
    "qkv": {16: (16, 64, 1), 64: (64, 64, 1), 128: (128, 64, 1), 1024: (128, 256, 1)},
    "o": {1: (16, 64, 1), 256: (128, 64, 1), 512: (128, 128, 1), 4096: (128, 256, 1)},
    "gate_up": {1: (16, 128, 1), 64: (64, 128, 1), 128: (128, 256, 1), 4096: (128, 256, 1)},
    "down": {1: (16, 64, 4), 32: (32, 64, 4), 64: (64, 64, 2), 128: (128, 64, 4)},
}


@pytest.mark.parametrize("shape, M", [(s, M) for s in MEASURED_INT8 for M in MEASURED_INT8[s]])
def test_the_measured_int8_tiles(shape, M):
    tile = int8_tile(M, *SHAPES[shape], H200_SMS)
    assert (tile.block_m, tile.block_n, tile.split) == MEASURED_INT8[shape][M]


# (warpgroups, rows of each, block_right, split, blocks of an SM, weight left)
MEASURED_INT8_HOPPER = {
    "qkv": {
        **{1: (2, 64, 16, 1, 1, True), 16: (1, 64, 16, 1, 1, True), 64: (1, 64, 64, 1, 1, True)},
        **{128: (1, 64, 128, 1, 1, True), 256: (2, 64, 128, 1, 1, True)},
        **{1024: (3, 64, 256, 1, 1, True), 4096: (2, 128, 128, 1, 1, False)},
    },
    "o": {1: (1, 64, 16, 4, 2, True), 32: (1, 64, 32, 1, 1, True)},
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
    "shape, M", [(shape, M) for shape in MEASURED_INT8_HOPPER for M in MEASURED_INT8_HOPPER[shape]]
)
def test_the_measured_hopper_tiles(shape, M):
    tile = int8_hopper_tile(M, *SHAPES[shape], H200_SMS)
    found = (tile.parts, tile.part, tile.block_right, tile.split, tile.blocks_per_sm)
    assert (*found, tile.weight_left) == MEASURED_INT8_HOPPER[shape][M]


@pytest.mark.parametrize("kind", ["int", "asymmetric", "float", "blocks"])
@pytest.mark.parametrize("sm_count", [78, 114, 132])
@pytest.mark.parametrize("N", [8, 1000, 6144, 151936])
def test_every_hopper_choice_fits(N, sm_count, kind):
    for M in (1, 3, 16, 17, 33, 64, 65, 200, 1025, 70000):
        for K in (32, 4096, 14336, 2**15):
            tile = int8_hopper_tile(M, N, K, sm_count, kind)
            assert tile.split == 1 or tile.fits_workspace(M, N)
            stages = tile.stages * (tile.block_left + tile.block_right) * 128
            stores = tile.parts * tile.stores * tile.part * tile.store_width * 2
            shared = stages + stores + 16 * tile.stages
            # the system takes 1 KB for each block
            assert tile.stages >= 3 and tile.blocks_per_sm * (shared + 1024) <= 228 * 1024
            # registers of the block's warpgroups, and what they have after the copying one gave
            threads = (tile.parts + 1) * 128
            assert tile.blocks_per_sm * threads * tile.registers <= 65536
            assert tile.registers % 8 == 0
            assert tile.parts * tile.consumer_registers + 24 <= (tile.parts + 1) * tile.registers
            sums = tile.part * tile.block_right // 128 * (2 if tile.steps_of_sum else 1)
            assert sums + 24 <= tile.consumer_registers <= 240
            assert (tile.steps_of_sum == 0) == (kind in ("int", "asymmetric"))
            assert kind != "asymmetric" or tile.parts < 3
            # blocks: a warpgroup's rows, or a tile's columns, lie in one block of the weight
            assert kind != "blocks" or (tile.steps_of_sum == 1 and tile.block_right <= 128)


@pytest.mark.parametrize("integers", [True, False], ids=["int8", "float8"])
@pytest.mark.parametrize("sm_count", [4, 108, 132])
@pytest.mark.parametrize("N", [8, 64, 1000, 6144, 151936])
def test_every_int8_choice_fits(N, sm_count, integers):
    for M in (1, 3, 16, 17, 33, 64, 65, 200, 257, 8192):
        for K in (32, 96, 1024, 14336):
            tile = int8_tile(M, N, K, sm_count, integers)
            stage = (tile.block_m + tile.block_n) * tile.block_k
            assert tile.stages * stage <= 200 * 1024
            assert tile.split <= ceil_div(K, tile.block_k), "a part without a step"
            if tile.split > 1:
                assert tile.split * M * N <= LINEAR_WORKSPACE_FLOATS
                assert ceil_div(N, tile.block_n) * ceil_div(M, tile.block_m) <= LINEAR_COUNTERS


@pytest.mark.parametrize(
    "group, block_k",
    [(32, 32), (64, 64), (96, 32), (128, 128), (256, 128), (14336, 128), (160, 32)],
)
def test_a_step_lies_in_one_group(group, block_k):
    assert linear_block_k(group) == block_k
    assert group % block_k == 0


def attention(**changes):
    problem = {
        "num_requests": 1,
        "num_kv_heads": 8,
        "heads_per_kv_head": 4,
        "head_dim": 128,
        "element_size": 2,
        "max_query_len": 1,
        "max_context_len": 8192,
        "window": None,
        "sm_count": H200_SMS,
    }
    return attention_tile(**problem | changes)


def test_chunks_split_where_their_tiles_leave_sms_idle():
    assert chunk_split(32, 32768, H200_SMS) == 4
    assert chunk_split(66, 32768, H200_SMS) == 2
    assert chunk_split(67, 32768, H200_SMS) == 1
    assert chunk_split(1, 2048, H200_SMS) == 2
    assert chunk_split(1, 2047, H200_SMS) == 1
    assert chunk_split(1, 2**20, H200_SMS) == CHUNK_MAX_SPLIT


def test_attention_splits_by_work():
    assert attention().split == 32
    assert attention(num_requests=8).split == 4
    assert attention(num_requests=64).split == 1
    assert attention(max_context_len=300).split == 2
    assert attention(max_context_len=255).split == 1
    assert attention(max_context_len=1024).split == 8
    assert attention(window=512).split == 4
    assert attention(max_query_len=512).split == 1


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 24, 40])
@pytest.mark.parametrize("max_query_len", [1, 2, 5, 100])
def test_attention_rows_are_whole_tokens(group, max_query_len):
    for head_dim in (16, 80, 128, 256):
        for element_size in (2, 4):
            tile = attention(
                heads_per_kv_head=group,
                max_query_len=max_query_len,
                head_dim=head_dim,
                element_size=element_size,
            )
            assert tile.block_m == tile.block_q * power_of_two(group) >= 16
            assert tile.block_m & (tile.block_m - 1) == 0
            assert 1 <= tile.split <= ATTENTION_MAX_SPLIT
            buffers = 2 * tile.keys * power_of_two(head_dim) * element_size * tile.stages
            assert buffers <= 200 * 1024


def test_int8_tiles_fit_a_smaller_shared_memory():
    """An H200's choices stay; those of a GPU with 99 KB keep their shape and lose stages."""
    for M in (1, 64, 128, 256, 1024, 4096):
        for N, K in SHAPES.values():
            for integers in (True, False):
                tile = int8_tile(M, N, K, H200_SMS, integers)
                assert fitted(tile, 227 * 1024) == tile
                small = fitted(tile, 99 * 1024)
                assert replace(small, stages=tile.stages) == tile and small.stages >= 2
                assert small.stages * (tile.block_m + tile.block_n) * tile.block_k < 99 * 1024
