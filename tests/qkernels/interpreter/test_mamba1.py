"""Mamba-1's kernel: near float64, the same bits for every cut of a request's rows, strided rows."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.mamba1 import reference
from tests.qkernels.mamba1_case import OF_ROWS, ChannelCase
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

# Requests that begin, that continue, that have no rows, that have no slot.
COUNTS, BEFORE, WITHOUT_SLOT = (1, 9, 3, 0, 5), (9, 0, 2, 5, 64), 4
CUTS = (4, 1, 1, 7, 2)  # of the rows of one request
SIZES = {
    "usual": {"channels": 75, "N": 16},  # a last tile that is not full
    "narrow": {"channels": 33, "N": 5},
    "wide": {"channels": 20, "N": 100},
}


def make(sizes, counts=COUNTS, before=BEFORE):
    case = ChannelCase.make(counts, before, **SIZES[sizes])
    slots = tuple(-1 if r == WITHOUT_SLOT else slot for r, slot in enumerate(case.slots))
    return replace(case, slots=slots)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_float32", [True, False], ids=["float32", "half"])
def test_scan_equals_recurrence(device, half, poison, assert_close, sizes, is_float32):
    case = make(sizes).to(torch.float32 if is_float32 else half, device)
    wide = case.to(torch.float64, device)
    want_states, got_states = wide.unread, case.unread
    want = wide.run(reference.channel_scan_, want_states)
    got = case.run(ops.channel_scan_, got_states, kernel="triton")
    assert_close("y", want, got, 1e-5 if is_float32 else 5e-3)
    assert_close("states", want_states[case.owned], got_states[case.owned], 1e-5)
    rest = [slot for slot in range(len(got_states)) if slot not in case.owned]
    assert torch.equal(got_states[rest].nan_to_num(7), case.unread[rest].nan_to_num(7))


@pytest.mark.parametrize("kernel", ["triton", "fixed_order"])
def test_chunk_boundaries_do_not_change_bits(device, half, poison, kernel):
    whole = make("usual", (sum(CUTS), 3), (0, 4)).to(half, device)
    want_state, state, start = whole.unread, whole.unread, 0
    want = whole.run(ops.channel_scan_, want_state, kernel=kernel)
    alone = replace(whole, slots=whole.slots[:1])
    for count in CUTS:
        got = alone.rows(start, count).run(ops.channel_scan_, state, kernel=kernel)
        assert torch.equal(got, want[start : start + count]), (start, count)
        start += count
    assert torch.equal(state[whole.slots[0]], want_state[whole.slots[0]])


def test_strided_rows(device, half, poison):
    """dt, B and C are columns of one matrix, x is half of another one."""
    case = make("narrow").to(half, device)
    views = {}
    for name in OF_ROWS:
        x = getattr(case, name)
        beside = torch.full((len(x), x.shape[1] + 9), torch.nan, dtype=half, device=device)
        beside[:, 4 : 4 + x.shape[1]] = x
        views[name] = beside[:, 4 : 4 + x.shape[1]]
    runs = (case, replace(case, **views))
    want, got = (each.run(ops.channel_scan_, each.unread, kernel="triton") for each in runs)
    assert torch.equal(want, got)


def test_rejected_rows_do_not_change_bits(device, half, poison):
    """A text with drafts, some of them rejected: the rows of the same text without."""
    case = make("usual", (NUM_ROWS,), (0,)).to(half, device)
    want = case.run(ops.channel_scan_, case.unread, kernel="triton")
    states = torch.full_like(case.memory_P1NI, torch.nan)
    shape = len(states), 2 * MAX_ROWS, reference.recent_width(75, 16)
    recent = torch.full(shape, torch.nan, dtype=half, device=device)

    def step_of(rows, num_rejected, step):
        made = (with_noise(x, rows, num_rejected) for x in case.of_rows)
        numbers = case.rates_NI, case.skip_I, states, step, recent
        return ops.channel_scan_(*made, *numbers, kernel="triton")

    check_steps(step_of, want, case.slots[0], 0.0)
