"""Mamba-1 in plain torch: transformers' scan, chunks, slots, fixed order, wrong arguments."""

from dataclasses import replace

import pytest
import torch
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.mamba1 import fixed_order, reference, together
from tests.qkernels.delta_net_case import assert_close
from tests.qkernels.mamba1_case import ChannelCase
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

# Requests that begin, that continue, that have no slot, that have no rows.
STEP = ((1, 70, 3, 0, 13, 1), (9, 0, 2, 5, 64, 0))
DECODE = ((1, 1, 1, 0, 1), (9, 0, 2, 5, 64))
SLOTS = (-1, -1, 3, 5, 0, 4)
MODULES = (reference, together, fixed_order)


@pytest.mark.parametrize("module", MODULES)
def test_prompt_equals_transformers(module):
    case = ChannelCase.make((67,), (0,))
    states = case.unread
    x, dt, b, c = (each.T[None] for each in case.of_rows)
    want, last = mamba_selective_scan(
        *(x, dt, case.rates_NI.T.contiguous(), b, c),
        D=case.skip_I,
        delta_softplus=True,
        return_last_state=True,
    )
    assert_close("y", want[0].T, case.run(module.channel_scan_, states), 1e-5)
    assert_close("state", last[0].T, states[case.slots[0], 0], 1e-5)


@pytest.mark.parametrize("module", MODULES[1:])
@pytest.mark.parametrize("step", [STEP, DECODE], ids=["mixed", "decode"])
def test_every_path_equals_recurrence(module, step):
    wide = ChannelCase.make(*step).to(torch.float64)
    want, got = wide.unread, wide.unread
    y_want = wide.run(reference.channel_scan_, want)
    assert_close("y", y_want, wide.run(module.channel_scan_, got), 1e-11)
    assert_close("states", want[wide.owned], got[wide.owned], 1e-11)


@pytest.mark.parametrize("module", MODULES)
def test_chunked_prompt_equals_whole_prompt(module):
    """A prompt in chunks of odd lengths, the last of one token, equals the whole prompt."""
    whole = ChannelCase.make((75,), (0,)).to(torch.float64)
    states, cut_states, start = whole.unread, whole.unread, 0
    y = whole.run(module.channel_scan_, states)
    for count in (2, 1, 40, 31, 1):
        part = whole.rows(start, count).run(module.channel_scan_, cut_states)
        assert_close("y", y[start : start + count], part, 1e-11)
        start += count
    assert start == 75
    assert_close("states", states[whole.owned], cut_states[whole.owned], 1e-11)


@pytest.mark.parametrize("module", MODULES)
def test_other_slots_are_unchanged(module):
    """Rows without a slot write nowhere, not even into the last slot."""
    case = ChannelCase.make(*STEP, slots=SLOTS)
    states = case.memory_P1NI.clone()
    case.run(module.channel_scan_, states)
    for slot in range(len(states)):
        assert torch.equal(states[slot], case.memory_P1NI[slot]) == (slot not in case.owned)


@pytest.mark.parametrize("of_rows", [torch.float32, torch.bfloat16], ids=str)
def test_fixed_order_has_the_same_bits_in_any_batch(of_rows):
    case = ChannelCase.make((40, 1, 12), (0, 33, 5)).to(of_rows)
    states = case.memory_P1NI.clone()
    together_ = case.run(ops.channel_scan_, states, kernel="fixed_order")
    whole = replace(case, slots=case.slots[:1])
    alone, start = case.memory_P1NI.clone(), 0
    for count in (3, 1, 1, 35):
        own = whole.rows(start, count).run(ops.channel_scan_, alone, kernel="fixed_order")
        assert torch.equal(own, together_[start : start + count])
        start += count
    assert torch.equal(states[case.slots[0]], alone[case.slots[0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dt_TI": lambda x: x[:, :-1]}, r"channel_scan_ dt: expected \[205, 75\]"),
        ({"c_TN": lambda x: x[:, :-1]}, r"channel_scan_ c: expected \[205, 12\]"),
        ({"skip_I": lambda x: x.bfloat16()}, "skip: expected torch.float32"),
        ({"memory_P1NI": lambda x: x.transpose(2, 3)}, "memory: expected"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    case = ChannelCase.make((76, 129), (0, 0))
    case = replace(case, **{name: wrong(getattr(case, name)) for name, wrong in change.items()})
    with pytest.raises(KernelError, match=message):
        case.run(ops.channel_scan_, case.memory_P1NI)


@pytest.mark.parametrize("module", MODULES)
def test_rejected_rows_are_not_in_state(module):
    case = ChannelCase.make((NUM_ROWS,), (0,)).to(torch.float32)
    wide = case.to(torch.float64)
    want = wide.run(reference.channel_scan_, wide.unread)
    memory = torch.full_like(case.memory_P1NI, torch.nan)
    recent = torch.full((len(memory), 2 * MAX_ROWS, reference.recent_width(75, 12)), torch.nan)

    def run(rows, num_rejected, step):
        made = (with_noise(x, rows, num_rejected) for x in case.of_rows)
        return module.channel_scan_(*made, case.rates_NI, case.skip_I, memory, step, recent)

    check_steps(run, want, case.slots[0], 1e-5)
