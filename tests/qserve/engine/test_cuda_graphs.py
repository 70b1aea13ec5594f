"""Which graph a step runs in."""

from dataclasses import replace

import numpy as np
import pytest

from qserve.engine.runner.graphs.cuda_graphs import (
    CHUNK_SIZES,
    LONG_CHUNK_SIZES,
    graph_keys,
    graph_rows,
    graph_sizes,
    max_graph_tokens,
    smallest_key,
)
from tests.qserve.engine.make_step import make_step


def found(keys, counts, num_sampled=None):
    key = smallest_key(keys, make_step(counts, num_sampled=num_sampled))
    return key and (key.num_tokens, key.num_requests)


@pytest.mark.parametrize("most", [1, 3, 8, 33, 64, 256, 300])
def test_every_number_of_rows_has_a_graph(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most


@pytest.mark.parametrize("most", [1, 5, 40, 256, 1000])
def test_every_decode_step_runs_in_the_next_larger_graph(most):
    keys = graph_keys(most, 2048)
    for rows in range(1, most + 1):
        size = next(size for size in graph_sizes(most) if size >= rows)
        assert found(keys, [1] * rows) == (size, size)


@pytest.mark.parametrize(
    ("num_tokens", "num_requests", "graph"),
    [
        (2, 1, (16, 8)),
        (16, 8, (16, 8)),
        (16, 9, (16, 16)),
        (17, 1, (32, 8)),
        (130, 3, (160, 8)),
        (161, 33, (192, 64)),
        (512, 64, (512, 64)),
        (513, 1, (576, 8)),
        (1024 + 63, 64, (1088, 64)),
        (1089, 1, None),
    ],
)
def test_chunks_run_in_the_smallest_graph_that_holds_them(num_tokens, num_requests, graph):
    counts = [1] * (num_requests - 1) + [num_tokens - num_requests + 1]
    assert found(graph_keys(64, 2048), counts) == graph


def test_chunk_graph_has_a_row_of_logits_for_every_sampled_row():
    keys = graph_keys(64, 2048)
    assert found(keys, [5, 5], num_sampled=[4, 4]) == (16, 8)
    assert found(keys, [5, 5], num_sampled=[5, 4]) == (16, 16)


def test_no_graph_is_larger_than_a_step_can_be():
    keys = graph_keys(4, 100)
    chunks = [key for key in keys if key.is_chunk]
    assert max(key.num_tokens for key in chunks) == max(s for s in CHUNK_SIZES if s <= 100)
    assert max(key.num_requests for key in keys) == 4
    # where all requests are few there is one graph for each size
    assert len(chunks) == len({key.num_tokens for key in chunks})


def test_smallest_graph_is_captured_first():
    sizes = [(key.num_tokens, key.num_requests) for key in graph_keys(256, 2048)]
    assert sizes == sorted(sizes)


def test_graph_rows_of_decodes_and_chunks():
    """Decodes with drafts are in neither: what they cost depends on how many there are."""
    rows = graph_rows(graph_keys(64, 200, counts=(1, 4), max_rows=64))
    assert rows["decode"] == graph_sizes(64)
    assert rows["chunk"] == [size for size in CHUNK_SIZES if size <= 200]


def test_slow_launch_models_get_larger_chunk_graphs():
    keys = graph_keys(64, 4096, chunk_sizes=LONG_CHUNK_SIZES)
    assert found(keys, [2048, *[1] * 63]) == (2112, 64) and found(keys, [2625]) is None
    assert found(graph_keys(64, 4096), [1089]) is None


@pytest.mark.parametrize(
    ("counts", "graph"),
    [
        ([*[1] * 32, 90], (128, 128, 1)),
        ([*[1] * 31, 90], (128, 128, 0)),
        ([*[1] * 31, 90, *[1] * 20], (160, 160, 0)),
        ([*[1] * 290, *[128] * 6], (1088, 300, 1)),
        ([*[1] * 290, 1000], (1344, 300, 1)),
        ([*[1] * 290, 1100], None),
        ([*[1] * 20, 1000], (1024, 300, 0)),
        ([1] * 300, (300, 300, 0)),
        ([90], (96, 8, 0)),
    ],
)
def test_steps_with_many_decodes_run_in_graphs_that_compute_them_separately(counts, graph):
    keys = graph_keys(300, 2048, decode_query_len=1)
    step = make_step(counts)
    key = smallest_key(keys, step)
    assert (key and (key.num_tokens, key.num_requests, key.decode_query_len)) == graph
    assert all(not key.decode_query_len for key in graph_keys(300, 2048))
    assert all(not key.decode_query_len for key in graph_keys(32, 2048, decode_query_len=1))
    most = max(key.num_tokens for key in keys)
    assert max_graph_tokens(CHUNK_SIZES, 300, 2048, 1) == most == 1344
    assert max_graph_tokens(CHUNK_SIZES, 300, 2048, 0) == 1088


def test_verified_drafts_are_decodes_of_several_rows():
    keys = graph_keys(64, 2048, counts=(1, 4), max_rows=64, decode_query_len=4)
    assert smallest_key(keys, make_step([4] * 40 + [70])).decode_query_len == 4
    assert smallest_key(keys, make_step([5] * 40 + [70])).decode_query_len == 0


def test_media_steps_use_only_chunk_graphs():
    keys = graph_keys(4, 100, with_media=True)
    assert {key.has_media for key in keys if not key.is_chunk} == {False}
    for counts, graph in (([20], (32, 4)), ([1], (16, 4)), ([1, 1, 40], (48, 4)), ([101], None)):
        step = replace(make_step(counts), axis_offsets_AT=np.zeros((3, sum(counts)), np.int64))
        key = smallest_key(keys, step)
        assert (key and (key.num_tokens, key.num_requests)) == graph
        assert key is None or (key.is_chunk and key.has_media)
        assert smallest_key(graph_keys(4, 100), step) is None
