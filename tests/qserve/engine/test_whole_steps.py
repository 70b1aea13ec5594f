"""Decode steps whose inputs travel in a ring: which steps, what their entries hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qkernels.sampling.words import (
    BIAS_END,
    BIAS_START,
    HISTORY_ROW,
    NUM_LOGPROBS,
    NUM_WORDS,
    TEMPERATURE,
    SampleRow,
    pack_row,
)
from qserve.engine.runner.graphs.cuda_graphs import first_keys, graph_keys, smallest_key
from qserve.engine.runner.graphs.step_buffers import GraphKey, StepBuffers
from qserve.engine.runner.graphs.whole_steps import (
    DEPTH,
    MAX_ROWS,
    WholeSteps,
    is_whole,
    launch_rings,
)
from qserve.engine.step.step_input import HistoryFill
from tests.qserve.engine.make_step import make_step

CPU = torch.device("cpu")
KEY = GraphKey(is_chunk=False, num_tokens=4, num_requests=4, is_whole=True)


def words(*rows):
    return np.array([(*pack_row(row), 0, 0) for row in rows], np.int64)


def test_steps_that_need_more_than_tokens_are_not_whole():
    step = make_step([1] * 3)
    assert is_whole(step)
    sampled = words(SampleRow(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, seed=5))
    assert is_whole(make_step([1], sample_words_SP=sampled))
    fill = HistoryFill(row=0, prompt_token_ids=np.zeros(1), output_token_ids=np.zeros(0))
    for other in (
        make_step([2, 1]),
        make_step([1] * (MAX_ROWS + 1)),
        make_step([1, 1], num_sampled=[1, 0]),
        replace(step, awaits_masks=True),
        replace(step, sample_bias_E=np.zeros(1, np.int64)),
        replace(step, history_fills=(fill,)),
        replace(step, adapter_slots_T=np.zeros(3, np.int32)),
        replace(step, axis_offsets_AT=np.zeros((3, 3), np.int64)),
        make_step([1], sample_words_SP=words(SampleRow(num_logprobs=0))),
        make_step([1], sample_words_SP=words(SampleRow(history_row=3))),
    ):
        assert not is_whole(other)


@pytest.mark.parametrize("most", [1, 5, 64])
def test_small_decodes_have_whole_graphs(most):
    keys = graph_keys(most, 2048, with_whole=True)
    assert [key for key in keys if not key.is_whole] == graph_keys(most, 2048)
    for rows in range(1, most + 1):
        step = make_step([1] * rows)
        whole, other = smallest_key(keys, step, is_whole=True), smallest_key(keys, step)
        assert not other.is_whole
        if rows <= MAX_ROWS:
            assert whole == replace(other, is_whole=True)
        else:
            assert whole is None
    assert sum(key.is_whole for key in first_keys(keys)) <= 2


def test_ring_entry_has_graph_inputs_and_sampling_words():
    plain = replace(KEY, is_whole=False)
    buffers = StepBuffers([KEY, plain], max_num_seqs=4, table_width=6, device=CPU)
    row = SampleRow(temperature=0.5, seed=9, position=40)
    step = make_step([1] * 3, width=5, sample_words_SP=words(row, SampleRow(), row))
    batch = buffers.batch(plain, 96)
    buffers.fill_(plain, step)
    expected = {
        name: getattr(batch, name).clone()
        for name in ("token_ids_T", "positions_T", "slots_T", "context_lengths_R")
    }
    tables = batch.block_tables_RX.clone()

    entry = np.full(buffers.num_words(KEY) + 5, 77, np.int64)
    ids = step.token_ids_T.copy()
    ids[1] = -1
    buffers.fill_entry_(KEY, step, ids, entry)
    assert buffers.holds == KEY and set(entry[-5:].tolist()) == {77}
    buffers.words(KEY).copy_(torch.from_numpy(entry[:-5]))  # as receive_ does
    batch = buffers.batch(KEY, 96)
    expected["token_ids_T"][1] = -1
    for name, value in expected.items():
        assert torch.equal(getattr(batch, name), value), name
    assert torch.equal(batch.block_tables_RX, tables)
    got = buffers.sample_words(KEY)
    assert got.shape == (4, NUM_WORDS) and got[:3].tolist() == step.sample_words_SP.tolist()
    padding = got[3]
    assert padding[BIAS_START] == padding[BIAS_END] and padding[HISTORY_ROW] < 0
    assert padding[NUM_LOGPROBS] < 0
    temperature = padding[TEMPERATURE].to(torch.int32).view(torch.float32)
    assert not temperature > 0, "greedy"


def test_ring_entries_are_filled_in_order_with_pending_tokens():
    whole = WholeSteps(10, CPU)
    first = whole.entry()
    first[:] = 5
    assert whole.entry()[0] == 5, "the same until its step is launched"
    copies = []
    for number in range(DEPTH + 1):
        slot = number % DEPTH
        whole.entry()[0] = number
        whole._out_DR[slot] = number * 10
        copies.append(whole.launched(2))
    assert [copy.wait().tolist() for copy in copies] == [[n * 10] * 2 for n in range(DEPTH + 1)]
    assert whole._entries[:, 0].tolist() == [DEPTH, *range(1, DEPTH)]

    pending = {"pending_index": np.array([2, 0]), "pending_row": np.array([1, 4])}
    step = make_step([1] * 3, **pending)
    known = step.token_ids_T.tolist()
    assert whole.token_ids(make_step([1] * 3), None).tolist() == known
    # the step before was whole: its samples are where the graph looks
    assert whole.token_ids(step, whole.samples_R[:3]).tolist() == [-5, known[1], -2]
    # it was another: its samples are brought there
    got = whole.token_ids(step, torch.tensor([50, 51, 52, 53, 54]))
    assert got.tolist() == [-2, known[1], -1]
    assert whole.samples_R[:2].tolist() == [51, 54]
    assert step.token_ids_T.tolist() == known, "the step itself stays"


def test_padding_step_keeps_samples():
    whole = WholeSteps(10, CPU)
    whole.samples_R[:] = torch.arange(MAX_ROWS)
    with whole.kept_samples():
        whole.samples_R.zero_()
    assert whole.samples_R.tolist() == list(range(MAX_ROWS))


def test_ring_kernels_compile_before_capture(monkeypatch):
    """No warm-up step launches them."""
    from qkernels.gpu import rings

    launched = []
    monkeypatch.setattr(rings, "launch", lambda kernel, *rest, **options: launched.append(kernel))
    launch_rings(CPU)
    assert launched == [rings._receive, rings._deliver]
