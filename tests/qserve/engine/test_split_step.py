"""Steps whose long chunks are computed apart (latent attention): rows, pages and requests."""

import numpy as np
import torch

from qserve.engine.step.device_step import Batch, BatchForm
from qserve.engine.step.split_step import split_step
from tests.qserve.engine.make_step import make_step

CPU = torch.device("cpu")
TABLES = np.arange(40, dtype=np.int32).reshape(4, 10)
CONTEXTS = np.array([7, 70, 5, 33], np.int32)


def step_of(*counts):
    return make_step(list(counts), block_tables_RX=TABLES, context_lengths_R=CONTEXTS)


def test_long_chunks_and_others():
    split = split_step(step_of(1, 20, 2, 33), CPU, min_rows=20, page_size=16)
    first, second = split.expanded
    assert (first.rows, second.rows) == (slice(1, 21), slice(23, 56))
    # 70 entries in 5 pages of 16, which fill two pages of 64 keys with three more
    assert first.pages_X.tolist() == [10, 11, 12, 13, 14, 14, 14, 14]
    assert first.step.block_tables_RX.tolist() == [[0, 1]]
    assert first.step.query_starts_R1.tolist() == [0, 20]
    assert first.step.context_lengths_R.tolist() == [70]
    assert (first.step.max_query_len, first.step.max_context_len) == (20, 70)
    assert second.pages_X.tolist() == [30, 31, 32, 32]
    others = split.others
    assert others.block_tables_RX.tolist() == TABLES[[0, 2]].tolist()
    assert others.query_starts_R1.tolist() == [0, 1, 3]
    assert others.context_lengths_R.tolist() == [7, 5]
    assert (others.max_query_len, others.max_context_len) == (2, 7)
    assert split.other_rows.tolist() == [0, 21, 22]


def test_steps_that_are_not_divided_or_only_long():
    assert split_step(step_of(1, 19, 2, 3), CPU, min_rows=20, page_size=16) is None
    split = split_step(step_of(20, 20, 20, 20), CPU, min_rows=20, page_size=128)
    assert split.others is None and len(split.expanded) == 4
    assert split.expanded[1].pages_X.tolist() == [10]  # a page of 128 holds two of 64
    assert split.expanded[1].step.block_tables_RX.tolist() == [[0, 1]]


def test_models_without_latents_have_no_divided_steps():
    step = step_of(1, 20, 2, 33)
    assert Batch.of(step, CPU, BatchForm(page_size=16)).split is None
    assert Batch.of(step, CPU, BatchForm(page_size=16, split_rows=20)).split is not None
