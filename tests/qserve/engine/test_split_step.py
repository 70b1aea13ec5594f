"""Steps whose long chunks are computed apart (latent attention): rows, pages and requests."""

from dataclasses import replace

import numpy as np
import torch

from qserve.engine.step import split_step as module
from qserve.engine.step.device_step import Batch, BatchForm
from qserve.engine.step.split_step import long_pairs, split_step
from qserve.model.cache_spec import SplitRule
from tests.qserve.engine.make_step import make_step

CPU = torch.device("cpu")
TABLES = np.arange(40, dtype=np.int32).reshape(4, 10)
CONTEXTS = np.array([7, 70, 5, 33], np.int32)


def step_of(*counts):
    return make_step(list(counts), block_tables_RX=TABLES, context_lengths_R=CONTEXTS)


RULE = SplitRule(rows=20, pairs=1, pairs_of_graph=10)


def test_long_chunks_are_separated():
    split = split_step(step_of(1, 20, 2, 33), CPU, RULE, page_size=16)
    (expanded,) = split.expanded
    assert expanded.rows.tolist() == [*range(1, 21), *range(23, 56)]
    # 70 entries in 5 pages of 16, which fill two pages of 64 keys with three more; then 33 in 3
    assert expanded.pages_X.tolist() == [10, 11, 12, 13, 14, 14, 14, 14, 30, 31, 32, 32]
    step = expanded.step
    assert step.block_tables_RX[0].tolist() == [0, 1] and step.block_tables_RX[1, 0] == 2
    assert step.query_starts_R1.tolist() == [0, 20, 53]
    assert step.context_lengths_R.tolist() == [70, 33]
    assert (step.max_query_len, step.max_context_len) == (33, 70)
    others = split.others
    assert others.block_tables_RX.tolist() == TABLES[[0, 2]].tolist()
    assert others.query_starts_R1.tolist() == [0, 1, 3]
    assert others.context_lengths_R.tolist() == [7, 5]
    assert (others.max_query_len, others.max_context_len) == (2, 7)
    assert split.other_rows.tolist() == [0, 21, 22]


def test_consecutive_rows_are_a_slice():
    split = split_step(step_of(1, 2, 20, 33), CPU, RULE, page_size=16)
    assert (split.expanded[0].rows, split.other_rows) == (slice(3, 56), slice(0, 3))
    whole = split_step(step_of(20, 20, 20, 20), CPU, RULE, page_size=128)
    assert whole.others is None and whole.expanded[0].rows == slice(0, 80)
    # a page of 128 entries holds two of 64 keys
    assert whole.expanded[0].pages_X.tolist() == [0, 10, 20, 30]
    assert whole.expanded[0].step.block_tables_RX[:, 0].tolist() == [0, 1, 3, 4]


def test_requests_with_many_keys_get_own_group(monkeypatch):
    """A request alone may have more keys than a group."""
    monkeypatch.setattr(module, "MAX_KEYS", 60)
    contexts = np.array([20, 40, 70, 33], np.int32)
    step = make_step([20] * 4, block_tables_RX=TABLES, context_lengths_R=contexts)
    split = split_step(step, CPU, RULE, page_size=16)
    assert [each.rows for each in split.expanded] == [slice(0, 40), slice(40, 60), slice(60, 80)]
    assert [each.step.context_lengths_R.tolist() for each in split.expanded] == [
        [20, 40],
        [70],
        [33],
    ]


def test_steps_with_few_pairs_are_not_divided():
    step = step_of(1, 20, 2, 33)
    assert long_pairs(step, RULE) == 20 * 70 + 33 * 33
    assert split_step(step, CPU, replace(RULE, pairs=20 * 70 + 33 * 33 + 1), 16) is None
    assert long_pairs(step_of(1, 19, 2, 3), RULE) == 0
    assert split_step(step_of(1, 19, 2, 3), CPU, RULE, page_size=16) is None


def test_models_without_latents_have_no_divided_steps():
    step = step_of(1, 20, 2, 33)
    assert Batch.of(step, CPU, BatchForm(page_size=16)).split is None
    assert Batch.of(step, CPU, BatchForm(page_size=16, split_rule=RULE)).split is not None
