"""Mamba-2 in plain torch: transformers' scan and norms, chunks, slots, wrong arguments."""

from dataclasses import replace

import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
    mamba2_chunk_scan,
)

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.mamba2 import chunked, reference
from tests.qkernels.delta_net_case import assert_close
from tests.qkernels.mamba2_case import ScanCase
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

# Requests that begin, that continue, that have no slot, that have no rows.
STEP = ((1, 70, 3, 0, 130, 1), (9, 0, 2, 5, 64, 0))
SLOTS = (-1, -1, 3, 5, 0, 4)
MODULES = (reference, chunked)


def parts(case, G=2, H=6, N=12, D=20):
    x, b, c = case.mixed_TC.split([H * D, G * N, G * N], 1)
    return x.unflatten(1, (H, D)), b.unflatten(1, (G, N)), c.unflatten(1, (G, N))


@pytest.mark.parametrize("module", MODULES)
def test_prompt_equals_transformers(module):
    case = ScanCase.make((67,), (0,))
    states = case.unread
    x, b, c = (part[None] for part in parts(case))
    want, last = mamba2_chunk_scan(
        *(x, case.dt_TH[None], -case.a_log_H.exp(), b, c, 16),
        D=case.skip_H,
        dt_bias=case.dt_bias_H,
        dt_softplus=True,
        dt_limit=case.limits,
        return_final_states=True,
    )
    assert_close("y", want[0], case.run(module.selective_scan_, states), 1e-5)
    assert_close("state", last[0].mT, states[case.slots[0]], 1e-5)


@pytest.mark.parametrize("module", MODULES)
def test_chunked_scan_equals_recurrence(module):
    """Also for requests that continue, and next to decode rows."""
    wide = ScanCase.make(*STEP).to(torch.float64)
    want, got = wide.unread, wide.unread
    y_want = wide.run(reference.selective_scan_, want)
    assert_close("y", y_want, wide.run(chunked.selective_scan_, got), 1e-11)
    assert_close("states", want[wide.owned], got[wide.owned], 1e-11)


@pytest.mark.parametrize("module", MODULES)
def test_chunked_prompt_equals_whole_prompt(module):
    """A prompt in chunks of odd lengths, the last of one token, equals the whole prompt."""
    whole = ScanCase.make((75,), (0,)).to(torch.float64)
    states, cut_states, start = whole.unread, whole.unread, 0
    y = whole.run(module.selective_scan_, states)
    for count in (2, 1, 40, 31, 1):
        part = whole.rows(start, count).run(module.selective_scan_, cut_states)
        assert_close("y", y[start : start + count], part, 1e-11)
        start += count
    assert start == 75
    assert_close("states", states[whole.owned], cut_states[whole.owned], 1e-11)


@pytest.mark.parametrize("module", MODULES)
def test_other_slots_are_unchanged(module):
    """Rows without a slot write nowhere, not even into the last slot."""
    case = ScanCase.make(*STEP, slots=SLOTS)
    states = case.memory_PHND.clone()
    case.run(module.selective_scan_, states)
    for slot in range(len(states)):
        assert torch.equal(states[slot], case.memory_PHND[slot]) == (slot not in case.owned)


def in_transformers(kind, x, z, weight, groups):
    if kind == "granite":
        norm = GraniteMoeHybridRMSNormGated(x.shape[1], x.shape[1] // groups, eps=1e-3)
    else:
        first = kind == "falcon, norm first"
        norm = FalconH1RMSNormGated(x.shape[1], 1e-3, groups, norm_before_gate=first)
    norm.weight.data.copy_(weight)
    with torch.no_grad():
        return norm(x[None], z[None])[0]


@pytest.mark.parametrize("kind", ["granite", "falcon", "falcon, norm first"])
def test_norm_equals_transformers(kind):
    x, z = torch.randn(2, 7, 60, generator=torch.Generator().manual_seed(1))
    weight = torch.linspace(-1, 2, 60)
    got = ops.gated_group_norm(x, z, weight, 3, 1e-3, kind.endswith("first"))
    assert_close("y", in_transformers(kind, x, z, weight, 3), got, 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixed_TC": lambda x: x[:, :-1]}, "B and C of 12 channels for groups that divide 6"),
        ({"dt_TH": lambda x: x[:, :-1]}, r"selective_scan_ dt: expected \[205, 6\]"),
        ({"skip_H": lambda x: x.bfloat16()}, "skip: expected torch.float32"),
        ({"memory_PHND": lambda x: x.transpose(2, 3)}, "expected"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    case = ScanCase.make((76, 129), (0, 0))
    case = replace(case, **{name: wrong(getattr(case, name)) for name, wrong in change.items()})
    with pytest.raises(KernelError, match=message):
        case.run(ops.selective_scan_, case.memory_PHND)


def test_uneven_norm_groups_are_refused():
    x = torch.zeros(2, 10)
    with pytest.raises(KernelError, match="expected 3 groups of channels, found 10"):
        ops.gated_group_norm(x, x, None, 3, 1e-5, False)


@pytest.mark.parametrize("module", [reference, chunked])
def test_rejected_rows_are_not_in_state(module):
    case = ScanCase.make((NUM_ROWS,), (0,)).to(torch.float32)
    wide = case.to(torch.float64)
    want = wide.run(reference.selective_scan_, wide.unread)
    memory = torch.full_like(case.memory_PHND, torch.nan)
    shape = len(memory), 2 * MAX_ROWS, reference.recent_width(120, 24, 6)
    recent = torch.full(shape, torch.nan)
    heads = case.a_log_H, case.skip_H, case.dt_bias_H

    def run(rows, num_rejected, step):
        made = (with_noise(x, rows, num_rejected) for x in (case.mixed_TC, case.dt_TH))
        return module.selective_scan_(*made, *heads, memory, case.limits, step, recent)

    check_steps(run, want, case.slots[0], 1e-5)
