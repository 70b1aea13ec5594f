"""Tile choices of W4A16's Hopper body: what every choice must satisfy, the measured by value."""

import pytest

from qkernels.tiles import LINEAR_COUNTERS, LINEAR_WORKSPACE_FLOATS
from qkernels.w4a16_hopper_tiles import LinearHopperTile, linear_hopper_tile

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
H200_SMS = 132
SHARED_MEMORY = 227 * 1024
TILES = [(2, 64), (2, 128), (3, 128), (2, 256)]

# shape -> M -> (parts, block_m, split, halves): the fastest of those whose times stand beside
# linear_hopper_tile
MEASURED = {
    "qkv": {
        128: (3, 128, 4, False),
        256: (3, 128, 2, False),
        512: (3, 128, 1, False),
        1024: (2, 256, 1, True),
    },
    "o": {
        **{64: (2, 64, 4, False), 128: (2, 128, 4, False), 256: (2, 128, 2, False)},
        **{512: (2, 128, 1, False), 1024: (2, 256, 1, False), 4096: (2, 256, 1, False)},
    },
    "gate_up": {
        **{128: (2, 128, 1, False), 256: (2, 256, 1, False)},
        **{512: (2, 256, 1, True), 1024: (2, 256, 1, False)},
    },
    "down": {
        **{64: (2, 64, 4, False), 128: (2, 128, 4, False), 256: (2, 256, 4, False)},
        **{512: (2, 256, 2, False), 1024: (2, 256, 1, False)},
    },
}


@pytest.mark.parametrize("shape, M", [(shape, M) for shape in MEASURED for M in MEASURED[shape]])
def test_the_measured_tiles(shape, M):
    tile = linear_hopper_tile(M, *SHAPES[shape], 128, H200_SMS)
    assert (tile.parts, tile.block_m, tile.split, tile.halves) == MEASURED[shape][M]


@pytest.mark.parametrize("sm_count", [4, 114, 132])
@pytest.mark.parametrize("K", [128, 384, 4096, 14336])
@pytest.mark.parametrize("N", [8, 72, 1000, 6144, 151936])
def test_every_choice_can_run(N, K, sm_count):
    for M in (33, 64, 65, 200, 257, 1000, 4096):
        tile = linear_hopper_tile(M, N, K, 128, sm_count)
        if tile is None:
            continue
        units = tile.tiles(M, N) * tile.split
        assert 1 <= tile.blocks <= sm_count
        assert tile.fits(M, N, K)
        if tile.split > 1:
            # parts wait for each other: each needs a block, and a step
            assert tile.blocks == units
            assert tile.split <= K // 128
            floats = units * tile.parts * 64 * tile.block_m
            assert floats <= LINEAR_WORKSPACE_FLOATS
            assert tile.tiles(M, N) * tile.parts <= LINEAR_COUNTERS


@pytest.mark.parametrize("parts, block_m", TILES)
@pytest.mark.parametrize("split", [1, 2, 4])
def test_registers_and_shared_memory_of_a_block(parts, block_m, split):
    tile = LinearHopperTile(blocks=1, parts=parts, block_m=block_m, split=split)
    # warps that copy come as four
    registers = 128 * (parts * tile.multiply_registers + tile.copy_registers)
    assert registers <= 128 * (parts + 1) * tile.registers <= 65536
    stage = 2 * block_m * 128 + parts * 4096
    stored = parts * 64 * tile.store_rows * 2
    assert tile.stages >= 3
    assert tile.stages * (stage + 16) + stored <= SHARED_MEMORY
    assert block_m // split % tile.store_rows == 0


def test_steps_of_128_inputs_only():
    N, K = SHAPES["gate_up"]
    assert linear_hopper_tile(1024, N, K, 256, H200_SMS) is not None
    assert linear_hopper_tile(1024, N, K, 64, H200_SMS) is None


@pytest.mark.parametrize("shape", ["qkv", "gate_up"])
def test_64_rows_stay_where_they_were_faster(shape):
    assert linear_hopper_tile(64, *SHAPES[shape], 128, H200_SMS) is None


def test_few_rows_and_small_weights_go_elsewhere():
    assert linear_hopper_tile(32, *SHAPES["down"], 128, H200_SMS) is None
    assert linear_hopper_tile(128, 896, 896, 128, H200_SMS) is None
