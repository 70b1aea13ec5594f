"""Shards of mixers with states, in published sizes."""

import pytest

from formats.architecture.states.parts import DELTA_NET, GRANITE_HYBRID, SHORT_CONV
from formats.errors import InputError
from formats.in_memory.state_shards import shard_states
from formats.scheme import Scheme

W4 = Scheme.parse("w4a16-sym")  # groups of 128 inputs
QWEN = {"linear_num_value_heads": 32, "linear_num_key_heads": 16}  # heads of 128
GRANITE = {"mamba_n_heads": 48, "mamba_n_groups": 1}  # heads of 64: two in a group of inputs
MAMBA = GRANITE_HYBRID["state_mixer"]


def shards(mixer, sizes, inputs, size, scheme=W4):
    found = shard_states(mixer, sizes, inputs, size, scheme, "layer.out_proj")
    assert len(found) == size
    ends = [each.heads for each in found]
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False)) and ends[0][0] == 0
    return found


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_value_heads_are_sharded_with_key_heads(size):
    found = shards(DELTA_NET, QWEN, 4096, size)
    assert {each.num_heads for each in found} == {32 // size}
    assert {each.num_kv_heads for each in found} == {16 // size}


def test_key_heads_are_replicated_beyond_their_number():
    found = shards(DELTA_NET, QWEN, 4096, 32)
    assert [each.kv_heads for each in found[:3]] == [(0, 1), (0, 1), (1, 2)]
    assert {each.num_heads for each in found} == {1}


@pytest.mark.parametrize(("size", "heads"), [(2, [24, 24]), (4, [12] * 4), (5, [10] * 4 + [8])])
def test_single_group_is_replicated(size, heads):
    """And shards end where groups of inputs do: at even heads."""
    found = shards(MAMBA, GRANITE, 3072, size)
    assert [each.num_heads for each in found] == heads
    assert all(each.kv_heads == (0, 1) for each in found)


def test_conv_channels_are_sharded_at_group_boundaries():
    found = shards(SHORT_CONV, {"hidden_size": 2048}, 2048, 3)
    assert [each.heads for each in found] == [(0, 768), (768, 1408), (1408, 2048)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (QWEN | {"linear_num_key_heads": 12}, "expected a multiple of linear_num_key_heads, 12"),
        (QWEN | {"linear_num_key_heads": None}, "linear_num_key_heads: is missing"),
        (QWEN, "size 24: 32 value heads of 16 key heads cannot be divided over 24 GPUs"),
    ],
)
def test_indivisible_sizes_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        shards(DELTA_NET, sizes, 4096, 24)
