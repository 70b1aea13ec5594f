"""Recurrences of fixed order: near float64, and the same bits for every cut of a request's rows."""

from dataclasses import replace

import pytest
import torch

from qkernels.delta_net import reference as delta_reference
from qkernels.delta_net import triton_recurrence as delta
from qkernels.mamba2 import reference as mamba_reference
from qkernels.mamba2 import triton_recurrence as mamba
from tests.qkernels.delta_net_case import DeltaCase
from tests.qkernels.mamba2_case import ScanCase
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

# Requests that begin, that go on, that have no rows, that have no slot.
COUNTS, BEFORE, WITHOUT_SLOT = (1, 9, 3, 0, 5), (9, 0, 2, 5, 64), 4
CUTS = (4, 1, 1, 7, 2)  # of the rows of one request
SIZES = {
    "delta": {"J": 2, "H": 4, "K": 12, "V": 20},
    "twice": {"J": 2, "H": 4, "K": 12, "V": 20},
    "channels": {"J": 2, "H": 4, "K": 12, "V": 20, "by_channel": True},
    "bounded": {"J": 2, "H": 4, "K": 12, "V": 20, "by_channel": True},
    "mamba": {"G": 2, "H": 4, "N": 12, "D": 20},
}


def run_delta(case, states, module=delta):
    return module.delta_rule_(*case.rule, states, case.step)


def run_twice(case, states, module=delta):
    """Tokens write up to twice their value."""
    return module.delta_rule_(*case.rule, states, case.step, **GIVEN["twice"])


def run_bounded(case, states, module=delta):
    """The log of a decay is at least -5."""
    return module.delta_rule_(*case.rule, states, case.step, **GIVEN["bounded"])


def run_mamba(case, states, module=mamba):
    return case.run(module.selective_scan_, states)


GIVEN = {"twice": {"write_factor": 2.0}, "bounded": {"decay_bound": -5.0}}
RUNS = {
    "delta": (run_delta, delta_reference),
    "channels": (run_delta, delta_reference),
    "twice": (run_twice, delta_reference),
    "bounded": (run_bounded, delta_reference),
    "mamba": (run_mamba, mamba_reference),
}


def make(kind, counts, before):
    if kind != "mamba":
        return DeltaCase(counts=counts, before=before, **SIZES[kind])
    return ScanCase.make(counts, before, **SIZES[kind])


def states_of(case):
    """States with NaN in every slot that no request of the step continues."""
    states = getattr(case, "memory_PHKV", None)
    states = (case.memory_PHND if states is None else states).clone()
    going = [s for s, n in zip(case.slots, case.before, strict=True) if n and s >= 0]
    states[[slot for slot in range(len(states)) if slot not in going]] = torch.nan
    return states


@pytest.mark.parametrize("kind", SIZES)
def test_kernel_equals_recurrence(device, half, poison, assert_close, kind):
    run, reference = RUNS[kind]
    case = make(kind, COUNTS, BEFORE)
    slots = [-1 if r == WITHOUT_SLOT else slot for r, slot in enumerate(case.slots)]
    case = replace(case, slots=tuple(slots)) if kind == "mamba" else case.with_slots(slots)
    for dtype, limit in ((torch.float32, 1e-5), (half, 5e-3)):
        own = case.to(dtype, device)
        wide = own.to(torch.float64, device)
        want_states, got_states = states_of(wide), states_of(own)
        want, got = run(wide, want_states, reference), run(own, got_states)
        assert_close("y", want, got, limit)
        owned = [s for s, n in zip(own.slots, own.counts, strict=True) if n and s >= 0]
        assert_close("states", want_states[owned], got_states[owned], 1e-5)
        rest = [slot for slot in range(len(got_states)) if slot not in owned]
        assert torch.equal(got_states[rest].nan_to_num(7), states_of(own)[rest].nan_to_num(7))


@pytest.mark.parametrize("kind", SIZES)
def test_chunk_boundaries_do_not_change_bits(device, half, poison, kind):
    run, _ = RUNS[kind]
    whole = make(kind, (sum(CUTS),), (0,)).to(half, device)
    want_state, state, start = states_of(whole), states_of(whole), 0
    want = run(whole, want_state)
    for count in CUTS:
        got = run(whole.rows(start, count), state)
        assert torch.equal(got, want[start : start + count]), (start, count)
        start += count
    slot = whole.slots[0]
    assert torch.equal(state[slot], want_state[slot])


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.exhaustive] if kind in GIVEN else []) for kind in SIZES],
)
def test_rejected_rows_do_not_change_bits(device, half, poison, kind):
    """A text with drafts, some of them rejected: the rows of the same text without."""
    run, reference = RUNS[kind]
    case = make(kind, (NUM_ROWS,), (0,)).to(half, device)
    want = run(case, states_of(case))
    by_channel = dict.fromkeys(("channels", "bounded"), (24, 80, 4, 48))
    sizes = {**by_channel, "mamba": (80, 24, 4)}.get(kind, (24, 80, 4))
    given = GIVEN.get(kind, {})
    states = torch.full_like(states_of(case), torch.nan)
    shape = len(states), 2 * MAX_ROWS, reference.recent_width(*sizes)
    recent = torch.full(shape, torch.nan, dtype=half, device=device)

    def step_of(rows, num_rejected, step):
        if kind != "mamba":
            made = (with_noise(x, rows, num_rejected) for x in case.rule[:3])
            return delta.delta_rule_(*made, *case.rule[3:], states, step, recent, **given)
        made = (with_noise(x, rows, num_rejected) for x in (case.mixed_TC, case.dt_TH))
        heads = case.a_log_H, case.skip_H, case.dt_bias_H
        return mamba.selective_scan_(*made, *heads, states, case.limits, step, recent)

    check_steps(step_of, want, case.slots[0], 0.0)
