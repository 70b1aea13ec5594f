"""Operations on states in fixed order on a CPU: a row has the same bits in any chunk and batch."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.delta_net import reference as delta_reference
from qkernels.mamba2 import reference as mamba_reference
from tests.qkernels.conv_case import ConvCase
from tests.qkernels.delta_net_case import DeltaCase
from tests.qkernels.mamba2_case import ScanCase
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

CUTS = (70, 1, 1, 9, 20, 2)
BESIDE = ((1, 33), (12, 5))  # counts of other requests, and their tokens before


def delta(case, states, kernel):
    return ops.delta_rule_(*case.rule, states, case.step, kernel=kernel)


def mamba(case, states, kernel):
    return case.run(ops.selective_scan_, states, kernel=kernel)


def conv(case, states, kernel):
    return case.run(ops.causal_conv_, states, kernel=kernel)


def short_conv(case, states, kernel):
    return case.run(ops.short_conv_, states, kernel=kernel)


KINDS = {
    "delta": (delta, lambda *c: DeltaCase(counts=c[0], before=c[1], J=2, H=6, K=12, V=20)),
    "mamba": (mamba, lambda *c: ScanCase.make(*c)),
    "conv": (conv, lambda *c: ConvCase.make("causal_conv_", *c, bias=True)),
    "short conv": (short_conv, lambda *c: ConvCase.make("short_conv_", *c)),
}


def states_of(case):
    name = next(name for name in ("memory_PHKV", "memory_PHND", "conv_PCL") if hasattr(case, name))
    return getattr(case, name).clone()


def in_pieces(run, case, kernel):
    states, start, found = states_of(case), 0, []
    for count in CUTS:
        found.append(run(case.rows(start, count), states, kernel))
        start += count
    return torch.cat(found), states[case.slots[0]]


@pytest.mark.parametrize("of_rows", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_chunk_boundaries_do_not_change_bits(kind, of_rows):
    run, make = KINDS[kind]
    case = make((sum(CUTS),), (0,)).to(of_rows)
    states = states_of(case)
    want = run(case, states, "fixed_order")
    found, last = in_pieces(run, case, "fixed_order")
    assert torch.equal(found, want) and torch.equal(last, states[case.slots[0]])
    near = run(case, states_of(case), None)
    torch.testing.assert_close(near.float(), want.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_other_requests_do_not_change_bits(kind):
    run, make = KINDS[kind]
    (first, others), (_, before) = (13, BESIDE[0]), BESIDE
    case = make((first, *others), (0, *before))
    own = case.slots[:1]
    rows = replace(case, slots=own).rows(0, first)
    states, alone = states_of(case), states_of(case)
    together = run(case, states, "fixed_order")
    assert torch.equal(run(rows, alone, "fixed_order"), together[:first])
    assert torch.equal(states[case.slots[0]], alone[case.slots[0]])


@pytest.mark.parametrize("of_rows", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["delta", "mamba", "conv"])
def test_rejected_rows_do_not_change_bits(kind, of_rows):
    """A text with drafts, some of them rejected: the rows of the same text without."""
    run, make = KINDS[kind]
    case = make((NUM_ROWS,), (0,)).to(of_rows)
    want = run(case, states_of(case), "fixed_order")
    states = torch.full_like(states_of(case), torch.nan)
    if kind == "conv":  # with columns for as many rejected rows
        states = torch.cat([states, states[:, :, :1].expand(-1, -1, MAX_ROWS)], 2).contiguous()
    width = {
        "delta": delta_reference.recent_width(24, 120, 6),
        "mamba": mamba_reference.recent_width(120, 24, 6),
    }
    shape = len(states), 2 * MAX_ROWS, width.get(kind, 1)
    recent = torch.full(shape, torch.nan, dtype=of_rows)

    def step_of(rows, num_rejected, step):
        names = {"delta": ("mixed_TC", "b_TH", "a_TH"), "mamba": ("mixed_TC", "dt_TH")}
        made = [
            with_noise(getattr(case, name), rows, num_rejected) for name in names.get(kind, ("x",))
        ]
        if kind == "conv":
            weights = case.weight_CW, case.bias_C
            return ops.causal_conv_(*made, *weights, states, step, kernel="fixed_order")
        if kind == "delta":
            last = states, step, recent, "fixed_order"
            return ops.delta_rule_(*made, *case.rule[3:], *last)
        heads = case.a_log_H, case.skip_H, case.dt_bias_H
        last = states, case.limits, step, recent, "fixed_order"
        return ops.selective_scan_(*made, *heads, *last)

    check_steps(step_of, want, case.slots[0], 0.0)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_default_kernel_depends_on_chunks(kind):
    run, make = KINDS[kind]
    case = make((sum(CUTS),), (0,))
    assert not torch.equal(in_pieces(run, case, None)[0], run(case, states_of(case), None))


def test_norms_are_per_row():
    generator = torch.Generator().manual_seed(1)
    x, z = torch.randn(2, 37, 6, 20, generator=generator)
    weight = torch.randn(20, generator=generator)
    whole = ops.gated_rms_norm(x, z, weight, 1e-6, "fixed_order")
    groups = torch.randn(120, generator=generator)
    of_groups = x.flatten(1), z.flatten(1), groups, 4, 1e-6, False, "fixed_order"
    by_group = ops.gated_group_norm(*of_groups)
    for t in range(37):
        row = slice(t, t + 1)
        assert torch.equal(
            ops.gated_rms_norm(x[row], z[row], weight, 1e-6, "fixed_order"), whole[row]
        )
        own = ops.gated_group_norm(of_groups[0][row], of_groups[1][row], *of_groups[2:])
        assert torch.equal(own, by_group[row])
    torch.testing.assert_close(whole, ops.gated_rms_norm(x, z, weight, 1e-6))
