"""Selection of keys by an indexer, and attention over them, in plain torch against float64."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.attention.cache import AttentionStep
from qkernels.attention.selected import order
from qkernels.errors import KernelError
from qkernels.latent.config import default_latent_config, selected_boundaries
from qkernels.latent.selected.selected_keys import SelectedKeys
from qkernels.latent.selected.window import keys_in_window
from tests.qkernels.latent_case import latent_case
from tests.qkernels.selected_case import selected_case

STEPS = [((1, 1, 1), (70, 1, 17)), ((5, 9), (5, 40)), ((1, 6, 0, 1), (33, 20, 4, 2))]
SIZES = {"heads": 5, "D": 24, "B": 8}


@pytest.mark.parametrize(("counts", "lengths"), STEPS)
@pytest.mark.parametrize("most", [1, 7, 20, 200])
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_highest_scores_are_selected(counts, lengths, most, block, monkeypatch):
    case = selected_case(counts, lengths, **SIZES, dtype=torch.float32)
    monkeypatch.setattr(order, "MAX_BYTES", 4 * block * max(lengths))
    step = (case.keys_PBD, case.step)
    found = ops.select_keys(case.q_TID, case.weights_TI, *step, most=most)
    assert found.slots_TS.shape == (sum(counts), min(most, max(lengths)))
    requests = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).tolist()
    for row, (request, scores) in enumerate(zip(requests, case.exact(), strict=True)):
        count = min(most, len(scores))
        best = scores.sort(descending=True, stable=True).indices[:count].sort().values
        assert found.counts_T[row] == count
        assert found.slots_TS[row, :count].tolist() == case.slots(request, best)
        assert not found.slots_TS[row, count:].any()


@pytest.mark.parametrize("sign", [1, -1])
def test_equal_scores_select_first_keys(sign):
    """A product below zero counts as 0, so many keys have the same score; -0 is one of them."""
    case = selected_case((1,), (40,), **SIZES, dtype=torch.float32)
    case.keys_PBD[:] = -case.q_TID[0].sum(0).sign() * 0.1
    q_TID = case.q_TID.abs() * case.q_TID[:1].sum(1, keepdim=True).sign()
    third = case.step.block_tables_RX[0, 3]
    case.keys_PBD[third, 5] = q_TID[0, 0]  # of position 29
    weights_TI = torch.full_like(case.weights_TI, float(sign))
    found = ops.select_keys(q_TID, weights_TI, case.keys_PBD, case.step, most=6)
    positions = [0, 1, 2, 3, 4, 29] if sign > 0 else [0, 1, 2, 3, 4, 5]
    assert found.slots_TS[0].tolist() == case.slots(0, torch.tensor(positions))


def test_padding_rows_attend_to_one_key():
    """A CUDA graph has more rows than the requests."""
    case = selected_case((1, 2), (9, 8), **SIZES, dtype=torch.float32)
    q_TID = torch.cat([case.q_TID, torch.full_like(case.q_TID, float("nan"))])
    weights_TI = torch.cat([case.weights_TI, case.weights_TI])
    found = ops.select_keys(q_TID, weights_TI, case.keys_PBD, case.step, most=4)
    assert found.counts_T.tolist() == [4] * 3 + [1] * 3 and not found.slots_TS[3:].any()


def test_rows_see_as_many_keys_as_stated():
    """Keys of windows are fewer than tokens, and a row may see none."""
    case = selected_case((3, 2), (5, 11), **SIZES, dtype=torch.float32)
    last_T = torch.tensor([-1, 0, 4, 6, 10], dtype=torch.int32)
    step = replace(case.step, max_context_len=44)  # tokens, 4 to a key
    found = ops.select_keys(
        case.q_TID, case.weights_TI, case.keys_PBD, step, most=4, last_T=last_T, num_keys=11
    )
    requests = (0, 0, 0, 1, 1)
    for row, (request, last) in enumerate(zip(requests, last_T.tolist(), strict=True)):
        whole = case.slots(request, torch.arange(last + 1))
        keys = case.keys_PBD.flatten(0, 1)[whole].double()
        scores = case.weights_TI[row].double() @ (case.q_TID[row].double() @ keys.T).relu()
        best = scores.sort(descending=True, stable=True).indices[:4].sort().values
        assert found.slots_TS[row, : len(best)].tolist() == [whole[i] for i in best]
        assert not found.slots_TS[row, len(best) :].any()


def test_keys_are_written_to_their_slots(dtype):
    keys_PBD = torch.full((3, 4, 8), 7.0, dtype=dtype)
    k_TD = torch.randn(3, 8, dtype=dtype)
    ops.write_index_keys_(k_TD, keys_PBD, torch.tensor([5, -1, 11]))
    want = torch.full((12, 8), 7.0, dtype=dtype)
    want[5], want[11] = k_TD[0], k_TD[2]
    assert torch.equal(keys_PBD.view(12, 8), want)
    ops.write_index_keys_(k_TD, keys_PBD, torch.tensor([-1, -1, -1]))
    assert torch.equal(keys_PBD.view(12, 8), want)
    ops.write_index_keys_(k_TD[:0], keys_PBD, torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize("codes", [None, torch.int8])
def test_rows_attend_only_to_selected_entries(codes, assert_close, tolerance):
    sizes = {"H": 3, "L": 32, "rope": 16, "B": 8}
    case = latent_case((1, 2), (30, 21), **sizes, dtype=torch.float32, codes=codes)
    seen = [[3, 4, 29], [0], [1, 2, 5, 20]]  # positions that rows see
    tables = case.step.block_tables_RX
    slots = torch.zeros(3, 4, dtype=torch.int32)
    want = []
    for row, (request, positions) in enumerate(zip((0, 1, 1), seen, strict=True)):
        t = torch.tensor(positions)
        slots[row, : len(t)] = tables[request, t // 8] * 8 + t % 8
        entries = case.entries[request][t].double()
        scores = case.q_THE[row].double() @ entries.T * case.scale
        want.append(scores.softmax(-1) @ entries[:, :32])
    counts = torch.tensor([len(each) for each in seen], dtype=torch.int32)
    selected = SelectedKeys(slots_TS=slots, counts_T=counts)
    got = ops.selected_latent_attention(
        case.q_THE, case.cache, selected, latent_width=32, scale=case.scale
    )
    assert_close("out", torch.stack(want), got, tolerance(torch.float32))


@pytest.mark.parametrize("kernel", ["sm90_decode", "-sm90_decode", "-triton, -sm90_decode"])
def test_choice_for_whole_contexts_has_no_effect(kernel):
    """sm90_decode takes no pages of one entry, but is requested for a model's whole attention."""
    case = latent_case((1, 1), (20, 9), H=3, L=16, rope=8, B=4, dtype=torch.float32)
    slots_TS = torch.stack([case.step.block_tables_RX[:, 0] * 4, case.step.block_tables_RX[:, 0]])
    chosen = SelectedKeys(slots_TS=slots_TS.int(), counts_T=torch.ones(2, dtype=torch.int32))
    settings = {"latent_width": 16, "scale": case.scale}
    want = ops.selected_latent_attention(case.q_THE, case.cache, chosen, **settings)
    got = ops.selected_latent_attention(case.q_THE, case.cache, chosen, **settings, kernel=kernel)
    assert torch.equal(got, want)


def test_invalid_arguments_are_refused():
    case = selected_case((1,), (9,), **SIZES, dtype=torch.float32)
    with pytest.raises(KernelError, match="select_keys weights: expected .1, 5., found .1, 4."):
        ops.select_keys(case.q_TID, case.weights_TI[:, :4], case.keys_PBD, case.step, most=4)
    with pytest.raises(KernelError, match="select_keys keys: expected .any, any, 24."):
        ops.select_keys(case.q_TID, case.weights_TI, case.keys_PBD[..., 1:], case.step, most=4)
    with pytest.raises(KernelError, match="write_index_keys_ slots: expected .2."):
        ops.write_index_keys_(torch.zeros(2, 24), case.keys_PBD, torch.tensor([1]))


def test_warm_up_covers_every_config():
    sizes = {"heads": 16, "element_size": 2, "sm_count": 132, "shared_bytes": 232_448}
    shapes = list(selected_boundaries(**sizes, most=2048, max_tokens=8192, max_context_len=10**5))
    assert all(requests == 1 and 2048 < keys >= rows for requests, rows, keys in shapes)
    found = {
        default_latent_config(num_requests=rows, max_query_len=1, max_context_len=2048, **sizes)
        for rows in range(1, 8193)
    }
    reached = {
        default_latent_config(num_requests=rows, max_query_len=1, max_context_len=2048, **sizes)
        for _, rows, _ in shapes
    }
    assert reached == found


@pytest.mark.parametrize("window", [1, 5, 8, 30])
def test_keys_in_windows(window):
    """Chunks and decode rows; a request without rows, and rows that belong to no request."""
    page_size, counts, lengths = 4, (3, 0, 1), (21, 9, 6)
    tables = torch.randperm(18, generator=torch.Generator().manual_seed(0)).view(3, 6).int()
    step = AttentionStep(
        block_tables_RX=tables,
        query_starts_R1=torch.tensor([0, *counts]).cumsum(0).int(),
        context_lengths_R=torch.tensor(lengths, dtype=torch.int32),
        max_query_len=3,
        max_context_len=21,
    )
    found = keys_in_window(step, 5, window=window, page_size=page_size)
    assert found.slots_TS.shape == (5, min(window, 21))
    for row, (request, position) in enumerate([(0, 18), (0, 19), (0, 20), (2, 5)]):
        keys = range(max(0, position + 1 - window), position + 1)
        want = [int(tables[request, k // page_size]) * page_size + k % page_size for k in keys]
        assert found.counts_T[row] == len(want)
        assert found.slots_TS[row].tolist() == want + [0] * (min(window, 21) - len(want))
    assert found.counts_T[4] == 1 and not found.slots_TS[4].any()
