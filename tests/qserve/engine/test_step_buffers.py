"""A step's arrays arrive in the buffers of its graph, followed by padding."""

import numpy as np
import pytest
import torch

from qkernels.attention.cache import decode_bounds
from qserve.engine.runner.graphs.step_buffers import ALIGNMENT, GraphKey, StepBuffers
from tests.qserve.engine.make_step import PER_TOKEN, make_step

DECODE = GraphKey(is_chunk=False, num_tokens=4, num_requests=4)
CHUNK = GraphKey(is_chunk=True, num_tokens=16, num_requests=3)


@pytest.fixture
def buffers():
    return StepBuffers([DECODE, CHUNK], max_num_seqs=5, table_width=6, device=torch.device("cpu"))


def check(batch, step, is_chunk):
    num_tokens, num_requests = step.num_tokens, step.num_requests
    for name, padding in zip(PER_TOKEN, (0, 0, -1), strict=True):
        got = getattr(batch, name)
        assert got.dtype == torch.int64 and got.data_ptr() % ALIGNMENT == 0
        assert got[:num_tokens].tolist() == getattr(step, name).tolist()
        assert set(got[num_tokens:].tolist()) <= {padding}
    lengths = batch.context_lengths_R
    assert lengths.dtype == torch.int32 and lengths.data_ptr() % ALIGNMENT == 0
    assert lengths[:num_requests].tolist() == step.context_lengths_R.tolist()
    assert not lengths[num_requests:].any()
    rows, columns = step.block_tables_RX.shape
    assert batch.block_tables_RX[:rows, :columns].tolist() == step.block_tables_RX.tolist()
    starts, rows = batch.query_starts_R1.tolist(), batch.logits_rows_S.tolist()
    if is_chunk:
        known = step.query_starts_R1.tolist()
        assert starts == known + [known[-1]] * (len(starts) - len(known)), "no rows"
        known = step.logits_rows_S.tolist()
        assert rows == known + [0] * (len(rows) - len(known))
    else:
        assert starts == list(range(DECODE.num_requests + 1))
        assert rows == list(range(DECODE.num_requests))


def test_buffers_of_consecutive_graphs(buffers):
    batches = {key: buffers.batch(key, 96) for key in (DECODE, CHUNK)}
    steps = [(CHUNK, [7, 5]), (DECODE, [1, 1, 1]), (CHUNK, [16, 0, 0]), (DECODE, [1] * 4)]
    for seed, (key, counts) in enumerate(steps):
        step = make_step(counts, seed=seed, width=2 + seed)
        buffers.fill_(key, step)
        check(batches[key], step, key.is_chunk)


def test_buffer_sizes_and_limits(buffers):
    decode, chunk = buffers.batch(DECODE, 96), buffers.batch(CHUNK, 96)
    assert (decode.max_query_len, chunk.max_query_len, chunk.max_context_len) == (1, 16, 96)
    assert decode.token_ids_T.shape == (4,) and chunk.token_ids_T.shape == (16,)
    assert chunk.block_tables_RX.shape == (3, 6) and chunk.query_starts_R1.shape == (4,)


@pytest.mark.parametrize("key", [DECODE, CHUNK])
def test_empty_step(buffers, key):
    buffers.fill_(key, make_step([1] * 3, width=3))
    buffers.pad_(key)
    batch = buffers.batch(key, 96)
    assert set(batch.slots_T.tolist()) == {-1}
    assert not batch.token_ids_T.any() and not batch.context_lengths_R.any()
    if key.is_chunk:
        assert not batch.query_starts_R1.any()


def test_only_changed_block_tables_are_copied(buffers):
    batch = buffers.batch(DECODE, 96)
    first = make_step([1, 1], seed=1, width=3)
    tables = first.block_tables_RX
    buffers.fill_(DECODE, first)
    batch.block_tables_RX[0, 0] = -5  # a mark: it stays while nothing changes
    buffers.fill_(DECODE, make_step([1, 1], seed=2, block_tables_RX=tables.copy()))
    assert batch.block_tables_RX[0, 0] == -5
    for change in (np.zeros((2, 3), np.int32), tables[:1], tables):
        step = make_step([1] * len(change), seed=3, block_tables_RX=change)
        buffers.fill_(DECODE, step)
        check(batch, step, is_chunk=False)


def test_bounds_of_decodes_follow_the_step():
    key = GraphKey(is_chunk=True, num_tokens=16, num_requests=6, decode_query_len=2)
    buffers = StepBuffers([CHUNK, key], max_num_seqs=6, table_width=6, device=torch.device("cpu"))
    decodes = buffers.batch(key, 96).decodes
    assert (decodes.num_requests, decodes.max_query_len, decodes.max_context_len) == (6, 2, 96)
    assert decodes.bounds_8.dtype == torch.int32 and decodes.bounds_8.data_ptr() % ALIGNMENT == 0
    for counts, num_decodes in (([1, 2, 1, 5, 1], 3), ([7, 1], 0), ([1, 1], 2)):
        buffers.fill_(key, make_step(counts))
        assert decodes.bounds_8.tolist() == list(decode_bounds(num_decodes))
    buffers.pad_(key)
    assert not decodes.bounds_8.any(), "no request is computed"
    assert buffers.batch(CHUNK, 96).decodes is None
