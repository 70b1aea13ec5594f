"""The convolutions' kernel against plain torch: several requests of different lengths in one step,
states carried on, fewer rows than taps, rows of a wider matrix."""

import pytest
import torch

from qkernels import ops
from qkernels.causal_conv import reference
from tests.qkernels.conv_case import PARTS, ConvCase
from tests.qkernels.delta_net_case import make_step
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

# Counts and tokens before: requests that begin, that continue, that are not there.
STEPS = {
    "decode": ((1, 1, 1, 0, 1), (0, 9, 1, 3, 200)),
    "prompts": ((1, 35, 3, 0, 17), (9, 0, 2, 5, 64)),
    "one": ((21,), (0,)),
    "fewer rows than taps": ((2, 1, 3, 2), (5, 1, 0, 1)),
}
WITHOUT_SLOT = 4


def make(op, name, **options):
    counts, before = STEPS[name]
    case = ConvCase.make(op, counts, before, **options)
    slots = tuple(-1 if r == WITHOUT_SLOT else slot for r, slot in enumerate(case.slots))
    return ConvCase(**{**vars(case), "slots": slots})


@pytest.mark.parametrize("op", PARTS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("taps", "bias"), [(2, False), (3, True), (8, False)])
def test_convolution(device, half, poison, assert_close, op, name, taps, bias):
    case = make(op, name, taps=taps, bias=bias, C=76).to(half, device)
    want_states, got_states = case.unread, case.unread
    want = case.run(getattr(reference, op), want_states)
    got = case.run(getattr(ops, op), got_states, kernel="triton")
    assert_close("y", want, got, 2e-3)
    assert torch.equal(got_states.nan_to_num(7), want_states.nan_to_num(7))


@pytest.mark.parametrize("op", PARTS)
def test_float32_rows_are_exact_over_chunks(device, poison, assert_close, op):
    whole = make(op, "one", taps=3, bias=True).to(torch.float32, device)
    wide = whole.to(torch.float64, device)
    want = wide.run(getattr(reference, op), wide.unread)
    states, start = whole.unread, 0
    for count in (9, 10, 1, 1):
        y = whole.rows(start, count).run(getattr(ops, op), states, kernel="triton")
        assert_close(f"y from {start}", want[start : start + count], y, 1e-6)
        start += count
    assert start == 21


@pytest.mark.parametrize("op", PARTS)
def test_rows_of_a_wider_matrix(device, half, poison, op):
    case = make(op, "prompts").to(half, device)
    beside = torch.full((len(case.x), case.x.shape[1] + 80), torch.nan, dtype=half, device=device)
    beside[:, : case.x.shape[1]] = case.x
    view = ConvCase(**{**vars(case), "x": beside[:, : case.x.shape[1]]})
    want, got = (c.run(getattr(ops, op), c.unread, kernel="triton") for c in (case, view))
    assert torch.equal(want, got)


@pytest.mark.parametrize("op", PARTS)
def test_rejected_rows_are_not_in_state(device, poison, op):
    case = ConvCase.make(op, (NUM_ROWS,), (0,), bias=True).to(torch.float32, device)
    wide = case.to(torch.float64, device)
    want = wide.run(getattr(reference, op), wide.unread)
    slot, states = case.slots[0], torch.full((5, 44, 3 + MAX_ROWS), torch.nan, device=device)

    def run(rows, num_rejected, step):
        x = with_noise(case.x, rows, num_rejected)
        return getattr(ops, op)(x, case.weight_CW, case.bias_C, states, step, kernel="triton")

    check_steps(run, want, slot, 1e-6)


@pytest.mark.parametrize("most_rows", [1, 4])
def test_requests_without_rows_or_slot(device, poison, most_rows):
    """Requests that begin, continue, follow verifications, and have no rows or no slot."""
    counts = (1, 4, 2, 1, 9, 0, 3, 1, 2)
    before = (7, 0, 12, 3, 30, 5, 8, 2, 40)
    slots = [5, 2, 0, 7, 1, 3, -1, 4, 6]
    covered_P = torch.tensor([12, 27, 99, 5, 2, 4, 30, 3], dtype=torch.int32)
    step = make_step(counts, before, slots, "cpu")
    want_P, got_P = covered_P.clone(), covered_P.to(device)
    want_R = reference.lacking_rows_(want_P, step, most_rows)
    got_R = ops.lacking_rows_(
        got_P, make_step(counts, before, slots, device), most_rows, kernel="triton"
    )
    assert torch.equal(got_R.cpu(), want_R) and torch.equal(got_P.cpu(), want_P)
    # the first had 3 rows that its memory lacks; the last has 10, of which at most 4 are kept
    assert want_R.tolist()[0] == min(3, most_rows) and want_R.tolist()[-1] == most_rows
    assert want_R.tolist()[1] == 0, "it begins"
