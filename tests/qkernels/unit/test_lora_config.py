"""Tiles of the LoRA kernels: parts of K cover all inputs; which kernel adds them."""

import itertools

import pytest

from qkernels.gpu.config import ceil_div
from qkernels.lora.config import (
    PARTS_LEFT,
    RANK_BLOCK,
    WORKSPACE_COUNTERS,
    fixed_shrink_config,
    num_owners,
    row_boundaries,
    shrink_config,
)

ROWS = (1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 129, 1000, 5000)


@pytest.mark.parametrize("leaves_parts", [False, True])
@pytest.mark.parametrize("num_slots", [1, 8, 300])
def test_k_splits_cover_inputs_and_none_is_empty(num_slots, leaves_parts):
    for T, K, S, R in itertools.product(ROWS, (64, 896, 4096, 14336), (1, 3), (8, 64)):
        config = shrink_config(T, K, S, R, num_slots, leaves_parts=leaves_parts)
        steps = ceil_div(ceil_div(K, config.inputs), config.parts)
        assert (config.parts - 1) * steps * config.inputs < K
        assert config.parts * steps * config.inputs >= K
        assert config.adds_parts == (not leaves_parts or T > 32)
        if not config.adds_parts:
            assert config.parts <= (PARTS_LEFT if T <= 16 else 8)
        elif config.parts > 1:
            tiles = ceil_div(T, config.rows) * S * ceil_div(R, RANK_BLOCK)
            assert tiles * num_owners(T, num_slots) <= WORKSPACE_COUNTERS


@pytest.mark.parametrize("num_slots", [1, 8, 300])
def test_fixed_order_splits_depend_only_on_k(num_slots):
    for K in (64, 896, 4096, 14336):
        tiles = set()
        for T, S, R in itertools.product(ROWS, (1, 3), (8, 64)):
            config = fixed_shrink_config(T, K, S, R, num_slots)
            tiles.add((config.rows, config.inputs, config.parts, config.warps, config.by_warp))
            groups = ceil_div(T, config.rows) * S * ceil_div(R, RANK_BLOCK)
            if config.adds_parts:
                assert groups * num_owners(T, num_slots, config.rows) <= WORKSPACE_COUNTERS
        ((_, inputs, parts, *_),) = tiles
        steps = ceil_div(ceil_div(K, inputs), parts)
        assert (parts - 1) * steps * inputs < K <= parts * steps * inputs


@pytest.mark.parametrize("K, S", [(4096, 3), (14336, 1), (300, 2)])
def test_warm_up_covers_every_shrink_config(K, S):
    first = row_boundaries(1024, K, S, 16, 8)
    for leaves in (False, True):
        known = {shrink_config(T, K, S, 16, 8, leaves_parts=leaves) for T in first}
        for T in range(1, 1025):
            config = shrink_config(T, K, S, 16, 8, leaves_parts=leaves)
            assert config in known, T
    known = {
        fixed_shrink_config(T, K, S, 16, 8)
        for T in row_boundaries(1024, K, S, 16, 8, fixed_order=True)
    }
    assert all(fixed_shrink_config(T, K, S, 16, 8) in known for T in range(1, 1025))
