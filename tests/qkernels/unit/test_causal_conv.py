"""Causal convolutions in plain torch: transformers' results, slots, chunks, wrong arguments."""

from dataclasses import replace

import pytest
import torch
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn

from qkernels import ops
from qkernels.causal_conv import batched, reference
from qkernels.errors import KernelError
from tests.qkernels.conv_case import PARTS, ConvCase
from tests.qkernels.delta_net_case import assert_close
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

# Requests that begin, that continue, that have no slot, that have no rows.
STEP = ((1, 70, 3, 0, 12, 1), (9, 0, 2, 5, 64, 0))
SLOTS = (-1, -1, 3, 5, 0, 4)
MODULES = (reference, batched)


def in_transformers(op, case):
    if op == "causal_conv_":
        return causal_conv1d_fn(case.x.T[None], case.weight_CW, case.bias_C, "silu")[0].T
    b, c, x = case.x.chunk(3, 1)
    return c * causal_conv1d_fn((b * x).T[None], case.weight_CW, case.bias_C)[0].T


@pytest.mark.parametrize("op", PARTS)
@pytest.mark.parametrize(("bias", "taps"), [(False, 3), (True, 4)])
@pytest.mark.parametrize("module", MODULES)
def test_convolution_equals_transformers(module, op, bias, taps):
    case = ConvCase.make(op, (37,), (0,), bias=bias, taps=taps)
    got = case.run(getattr(module, op), case.unread)
    assert_close("y", in_transformers(op, case), got, 1e-6)


@pytest.mark.parametrize("op", PARTS)
def test_batched_rows_equal_single_requests(op):
    case = ConvCase.make(op, *STEP, bias=True)
    want, got = case.unread, case.unread
    y_want = case.run(getattr(reference, op), want)
    assert_close("y", y_want, case.run(getattr(ops, op), got), 1e-6)
    assert torch.equal(want.nan_to_num(7), got.nan_to_num(7))


@pytest.mark.parametrize("op", PARTS)
@pytest.mark.parametrize("module", MODULES)
def test_chunked_prompt_equals_whole_prompt(module, op):
    """A prompt in chunks of odd lengths, the last of one token, equals the whole prompt."""
    whole = ConvCase.make(op, (75,), (0,), bias=True)
    conv, conv_cut, start = whole.unread, whole.unread, 0
    y = whole.run(getattr(module, op), conv)
    for count in (2, 1, 40, 31, 1):
        part = whole.rows(start, count)
        assert_close("y", y[start : start + count], part.run(getattr(module, op), conv_cut), 1e-6)
        start += count
    assert start == 75
    assert torch.equal(conv[whole.slots[0]], conv_cut[whole.slots[0]])


@pytest.mark.parametrize("op", PARTS)
@pytest.mark.parametrize("module", MODULES)
def test_other_slots_are_unchanged(module, op):
    """Rows without a slot write nowhere, not even into the last slot."""
    case = ConvCase.make(op, *STEP, slots=SLOTS)
    states = case.conv_PCL.clone()
    case.run(getattr(module, op), states)
    written = {slot for slot, count in zip(SLOTS, case.counts, strict=True) if count} - {-1}
    for slot in range(len(states)):
        assert torch.equal(states[slot], case.conv_PCL[slot]) == (slot not in written)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("causal_conv_", {"weight_CW": lambda w: w[:, :1]}, "2 to 8 taps, found 1"),
        ("causal_conv_", {"bias_C": lambda b: b[1:]}, r"causal_conv_ bias: expected \[44\]"),
        ("short_conv_", {"x": lambda x: x[:, 1:]}, "b, c and x side by side, found 131 columns"),
        ("short_conv_", {"conv_PCL": lambda c: c[:, 1:]}, "short_conv_ conv: expected"),
    ],
)
def test_invalid_arguments_are_refused(op, change, message):
    case = ConvCase.make(op, (5,), (0,), bias=True)
    case = replace(case, **{name: wrong(getattr(case, name)) for name, wrong in change.items()})
    with pytest.raises(KernelError, match=message):
        case.run(getattr(ops, op), case.conv_PCL)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("op", PARTS)
def test_rejected_rows_are_not_in_state(module, op):
    case = ConvCase.make(op, (NUM_ROWS,), (0,), bias=True).to(torch.float32)
    wide = case.to(torch.float64)
    want = wide.run(getattr(reference, op), wide.unread)
    slot, states = case.slots[0], torch.full((5, 44, 3 + MAX_ROWS), torch.nan)

    def run(rows, num_rejected, step):
        x = with_noise(case.x, rows, num_rejected)
        return getattr(module, op)(x, case.weight_CW, case.bias_C, states, step)

    check_steps(run, want, slot, 1e-6)
