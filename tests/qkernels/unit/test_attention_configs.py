"""Tile choices of paged attention."""

import pytest

from qkernels.attention.config import (
    MAX_SPLIT_KV,
    PREFILL_MAX_SPLIT,
    default_attention_config,
    prefill_split,
)
from qkernels.attention.fixed_order.config import (
    MAX_PARTIAL_BYTES,
    SEGMENT_KEYS,
    segment_splits,
    tile_config,
)
from qkernels.gpu.config import power_of_two

H200_SMS = 132


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
    return default_attention_config(**problem | changes)


def test_chunks_split_if_tiles_leave_sms_idle():
    assert prefill_split(32, 32768, H200_SMS) == 4
    assert prefill_split(66, 32768, H200_SMS) == 2
    assert prefill_split(67, 32768, H200_SMS) == 1
    assert prefill_split(1, 2048, H200_SMS) == 2
    assert prefill_split(1, 2047, H200_SMS) == 1
    assert prefill_split(1, 2**20, H200_SMS) == PREFILL_MAX_SPLIT


def test_attention_splits_by_work():
    assert attention().split == 32
    assert attention(num_requests=8).split == 4
    assert attention(num_requests=64).split == 1
    assert attention(max_context_len=300).split == 4, "three steps of keys"
    assert attention(max_context_len=256).split == 2
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
            assert 1 <= tile.split <= MAX_SPLIT_KV
            buffers = 2 * tile.keys * power_of_two(head_dim) * element_size * tile.stages
            assert buffers <= 200 * 1024


def test_few_segments_are_shared_by_programs():
    one, many = (segment_splits(programs, 64, 1 << 20, H200_SMS) for programs in (8, 1024))
    assert 32 <= one <= 64 and many == 1
    assert segment_splits(8, 3, 1 << 20, H200_SMS) == 3, "no more programs than segments"
    assert segment_splits(8, 64, MAX_PARTIAL_BYTES + 1, H200_SMS) == 1, "sums would not fit"


@pytest.mark.parametrize("group", [1, 4, 7, 16, 24])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_fixed_order_key_step_depends_only_on_model(D, group):
    sizes = {"heads_per_kv_head": group, "head_dim": D, "element_size": 2}
    configs = [tile_config(**sizes, max_query_len=count) for count in (1, 2, 16, 2048)]
    (keys,) = {config.keys for config in configs}
    assert SEGMENT_KEYS % keys == 0
    padded = power_of_two(group)
    rows = [config.block_q * padded for config in configs]
    assert rows == sorted(rows) and rows[0] == max(16, padded)
    assert rows[-1] == max(padded, 32)
