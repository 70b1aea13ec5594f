"""Which graph a step runs in."""

import pytest

from qserve.engine.cuda_graphs import CHUNK_SIZES, graph_kinds, graph_sizes, smallest_kind


def found(kinds, is_chunk, num_tokens, num_requests):
    kind = smallest_kind(kinds, is_chunk, num_tokens, num_requests)
    return kind and (kind.num_tokens, kind.num_requests)


@pytest.mark.parametrize("most", [1, 3, 8, 33, 64, 256, 300])
def test_every_number_of_rows_has_a_graph(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most


@pytest.mark.parametrize("most", [1, 5, 40, 256, 1000])
def test_every_decode_step_runs_in_the_next_larger_graph(most):
    kinds = graph_kinds(most, 2048)
    for rows in range(1, most + 1):
        size = next(size for size in graph_sizes(most) if size >= rows)
        assert found(kinds, False, rows, rows) == (size, size)


@pytest.mark.parametrize(
    ("num_tokens", "num_requests", "graph"),
    [
        (2, 1, (16, 8)),
        (16, 8, (16, 8)),
        (16, 9, (16, 16)),
        (17, 1, (32, 8)),
        (130, 3, (192, 8)),
        (160, 33, (192, 64)),
        (512, 64, (512, 64)),
        (513, 1, (768, 8)),
        (1025, 1, None),
    ],
)
def test_chunks_run_in_the_smallest_graph_that_holds_them(num_tokens, num_requests, graph):
    assert found(graph_kinds(64, 2048), True, num_tokens, num_requests) == graph


def test_no_graph_is_larger_than_a_step_can_be():
    kinds = graph_kinds(4, 100)
    chunks = [kind for kind in kinds if kind.is_chunk]
    assert max(kind.num_tokens for kind in chunks) == max(s for s in CHUNK_SIZES if s <= 100)
    assert max(kind.num_requests for kind in kinds) == 4
    # where all requests are few there is one graph for each size
    assert len(chunks) == len({kind.num_tokens for kind in chunks})


def test_the_smallest_comes_first():
    sizes = [(kind.num_tokens, kind.num_requests) for kind in graph_kinds(256, 2048)]
    assert sizes == sorted(sizes)
