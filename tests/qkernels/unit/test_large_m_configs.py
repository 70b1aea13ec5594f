"""Tile choices of the Hopper body: what every choice must satisfy, the measured by value."""

import pytest

from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.wna16.configs import default_config
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig
from qkernels.wna16.sm90_large_m_config import LargeMConfig, default_large_m_config
from qkernels.wna16.triton_config import TritonGemmConfig

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
H200_SMS = 132
SHARED_MEMORY = 227 * 1024
TILES = [(2, 64), (2, 128), (3, 128), (2, 256)]
both_bits = pytest.mark.parametrize("bits", [4, 8])

# bits -> shape -> M -> (parts, block_m, split, halves): the fastest of those whose times stand
# beside default_large_m_config, or within 2 percent of it
MEASURED_4 = {
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


MEASURED_8 = {
    "qkv": MEASURED_4["qkv"] | {4096: (2, 256, 1, False)},
    "o": MEASURED_4["o"],
    "gate_up": MEASURED_4["gate_up"] | {64: (2, 64, 1, False), 4096: (2, 256, 1, True)},
    "down": MEASURED_4["down"] | {4096: (2, 256, 1, False)},
}
MEASURED = [
    (bits, shape, M, tile)
    for bits, shapes in ((4, MEASURED_4), (8, MEASURED_8))
    for shape, tiles in shapes.items()
    for M, tile in tiles.items()
]


@pytest.mark.parametrize("bits, shape, M, expected", MEASURED)
def test_the_measured_tiles(bits, shape, M, expected):
    tile = default_large_m_config(M, *SHAPES[shape], 128, bits, H200_SMS)
    assert (tile.parts, tile.block_m, tile.split, tile.halves) == expected
    assert tile.bits == bits


@pytest.mark.parametrize("sm_count", [4, 114, 132])
@pytest.mark.parametrize("K", [128, 384, 4096, 14336])
@pytest.mark.parametrize("N", [8, 72, 1000, 6144, 151936])
@both_bits
def test_every_choice_can_run(N, K, sm_count, bits):
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
            floats = units * tile.parts * 64 * tile.block_m
            assert floats <= WORKSPACE_FLOATS
            assert tile.tiles(M, N) * tile.parts <= WORKSPACE_COUNTERS


@pytest.mark.parametrize("parts, block_m", TILES)
@pytest.mark.parametrize("split", [1, 2, 4])
@both_bits
def test_registers_and_shared_memory_of_a_block(parts, block_m, split, bits):
    tile = LargeMConfig(blocks=1, bits=bits, parts=parts, block_m=block_m, split=split)
    # warps that copy come as four
    registers = 128 * (parts * tile.multiply_registers + tile.copy_registers)
    assert registers <= 128 * (parts + 1) * tile.registers <= 65536
    # x of so many stages, words of the steps that have begun, results on their way out
    x = 2 * block_m * 128 // tile.stages_of_step
    stored = parts * 64 * tile.store_rows * tile.store_buffers * 2
    used = tile.stages * (x + 16) + tile.words_slots * parts * 1024 * bits + stored
    assert used <= SHARED_MEMORY
    assert tile.stages >= 3 and tile.stages >= 2 * tile.stages_of_step
    assert tile.words_slots * tile.stages_of_step >= tile.stages
    rows = block_m // split
    assert rows % tile.store_rows == 0
    # pieces take the buffers in turn, also from one tile to the next
    assert rows // tile.store_rows % tile.store_buffers == 0


@pytest.mark.parametrize("parts, block_m", TILES)
def test_an_even_number_of_products_in_a_step(parts, block_m):
    """And more than are in flight: each has registers of its own."""
    tile = LargeMConfig(blocks=1, parts=parts, block_m=block_m)
    assert 128 // tile.piece % 2 == 0
    assert 128 // tile.piece > tile.pending
    assert tile.stages_of_step == 1 or 128 // tile.piece // 2 + tile.pending <= 128 // tile.piece


def test_steps_of_128_inputs_only():
    N, K = SHAPES["gate_up"]
    assert default_large_m_config(1024, N, K, 256, 4, H200_SMS) is not None
    assert default_large_m_config(1024, N, K, 64, 4, H200_SMS) is None


@pytest.mark.parametrize("shape, bits", [("qkv", 4), ("gate_up", 4), ("qkv", 8)])
def test_64_rows_stay_where_they_were_faster(shape, bits):
    assert default_large_m_config(64, *SHAPES[shape], 128, bits, H200_SMS) is None


@both_bits
def test_the_body_is_taken_where_gluon_is(bits):
    problem = {"N": 6144, "K": 4096, "group": 128, "bits": bits, "sm_count": H200_SMS}
    for M, body in ((1, GemvImmaConfig), (512, LargeMConfig)):
        assert isinstance(default_config(M, **problem, gluon=True), body)
        assert isinstance(default_config(M, **problem, gluon=False), TritonGemmConfig)


@both_bits
def test_few_rows_and_small_weights_go_elsewhere(bits):
    assert default_large_m_config(32, *SHAPES["down"], 128, bits, H200_SMS) is None
    assert default_large_m_config(128, 896, 896, 128, bits, H200_SMS) is None
