"""Mamba-2's kernels against the recurrence in float64: odd sizes, several requests of different
lengths in one step, states carried on."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.mamba2 import reference, triton_scan
from qkernels.mamba2.config import scan_config
from tests.qkernels.mamba2_case import ScanCase
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

# Counts and tokens before: requests that begin, that continue, that are not there.
STEPS = {
    "decode": ((1, 1, 1, 0, 1), (0, 9, 1, 3, 200)),
    "prompts": ((1, 35, 3, 0, 17), (9, 0, 2, 5, 64)),
    "one": ((21,), (0,)),
}
WITHOUT_SLOT = 4
SIZES = {
    "narrow": {"G": 2, "H": 4, "N": 12, "D": 20},
    "half a tile": {"G": 2, "H": 8, "N": 22, "D": 16},
    "wide": {"G": 1, "H": 2, "N": 40, "D": 72},  # columns of more than one program
}


def make(name, **sizes):
    counts, before = STEPS[name]
    case = ScanCase.make(counts, before, **sizes)
    slots = tuple(-1 if r == WITHOUT_SLOT else slot for r, slot in enumerate(case.slots))
    return replace(case, slots=slots)


def check(assert_close, case, limit, states_limit=None):
    wide = case.to(torch.float64, case.mixed_TC.device)
    want_states, got_states = wide.unread, case.unread
    want = wide.run(reference.selective_scan_, want_states)
    got = case.run(ops.selective_scan_, got_states, kernel="triton")
    assert_close("y", want, got, limit)
    assert_close("states", want_states[case.owned], got_states[case.owned], states_limit or limit)
    rest = [slot for slot in range(len(got_states)) if slot not in case.owned]
    assert torch.equal(got_states[rest].nan_to_num(7), case.unread[rest].nan_to_num(7))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_float32", [True, False], ids=["float32", "half"])
def test_scan_equals_recurrence(device, half, poison, assert_close, name, sizes, is_float32):
    dtype = torch.float32 if is_float32 else half
    check(assert_close, make(name, **SIZES[sizes]).to(dtype, device), 1e-5 if is_float32 else 5e-3)


def test_16_bit_operands(device, half, poison, assert_close, monkeypatch):
    """As bfloat16 runs on a GPU: chunks of 64 rows, products of 16 bits."""

    def config(N, D, dtype):
        return replace(scan_config(N, D, dtype), operands=half, rows=64, columns=32)

    types = {torch.float16: triton_scan.tl.float16, torch.bfloat16: triton_scan.tl.bfloat16}
    monkeypatch.setattr(triton_scan, "scan_config", config)
    monkeypatch.setattr(triton_scan, "_TRITON_TYPES", types)
    check(assert_close, make("prompts", **SIZES["wide"]).to(half, device), 1e-2)


def test_every_length(device, poison, assert_close):
    """Requests of 1 to 65 rows side by side, at the edges of chunks of 16 rows."""
    counts = (64, 1, 15, 2, 17, 0, 31, 1, 65, 33, 32)
    before = tuple(7 * (r % 3) for r in range(len(counts)))
    case = ScanCase.make(counts, before, G=1, H=2, N=16, D=8)
    check(assert_close, case.to(torch.float32, device), 1e-5)


def test_chunks_then_single_tokens_equal_recurrence(device, poison, assert_close):
    whole = ScanCase.make((42,), (0,), **SIZES["narrow"]).to(torch.float32, device)
    wide = whole.to(torch.float64, device)
    want_states, states, start = wide.unread, whole.unread, 0
    want = wide.run(reference.selective_scan_, want_states)
    for count in (20, 17, 3, 1, 1):
        y = whole.rows(start, count).run(ops.selective_scan_, states, kernel="triton")
        assert_close(f"y from {start}", want[start : start + count], y, 1e-5)
        start += count
    assert start == 42
    assert_close("state", want_states[whole.owned], states[whole.owned], 1e-5)


def test_full_decay_keeps_later_tokens_accurate(device, poison, assert_close):
    """After a token with a decay of exp(-1e6) the others' small decays still count."""
    case = ScanCase.make((80,), (3,), **SIZES["narrow"])
    case.dt_TH[[5, 40, 41]] = 6e4
    case.a_log_H.fill_(2.7)
    case.dt_bias_H.fill_(-7.0)
    case = replace(case, limits=(0.0, float("inf"))).to(torch.float32, device)
    check(assert_close, case, 1e-4)


def test_rows_of_a_wider_matrix(device, half, poison):
    """As the block has them: z, x, B, C and dt side by side."""
    case = make("prompts", **SIZES["narrow"]).to(half, device)
    (T, C), H = case.mixed_TC.shape, case.dt_TH.shape[1]
    beside = torch.full((T, 80 + C + H), torch.nan, dtype=half, device=device)
    beside[:, 80 : 80 + C], beside[:, 80 + C :] = case.mixed_TC, case.dt_TH
    view = replace(case, mixed_TC=beside[:, 80 : 80 + C], dt_TH=beside[:, 80 + C :])
    want, got = (c.run(ops.selective_scan_, c.unread, kernel="triton") for c in (case, view))
    assert torch.equal(want, got)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("norm", ["none", "first", "last"])
def test_norm(device, half, poison, assert_close, groups, norm):
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(5, 200, generator=generator).to(device, half)[:, :177] for _ in "xz")
    weight = torch.randn(177, generator=generator).to(device, half)
    rest = None if norm == "none" else weight, groups, 1e-3, norm == "first"
    want = ops.gated_group_norm(x, z, *rest, kernel="reference")
    got = ops.gated_group_norm(x, z, *rest, kernel="triton")
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(half).eps, atol=1e-6)


def test_rejected_rows_are_not_in_state(device, poison):
    case = ScanCase.make((NUM_ROWS,), (0,)).to(torch.float32, device)
    wide = case.to(torch.float64, device)
    want = wide.run(reference.selective_scan_, wide.unread)
    memory = torch.full_like(case.memory_PHND, torch.nan)
    shape = len(memory), 2 * MAX_ROWS, reference.recent_width(120, 24, 6)
    recent = torch.full(shape, torch.nan, device=device)
    heads = case.a_log_H, case.skip_H, case.dt_bias_H

    def run(rows, num_rejected, step):
        made = (with_noise(x, rows, num_rejected) for x in (case.mixed_TC, case.dt_TH))
        return ops.selective_scan_(
            *made, *heads, memory, case.limits, step, recent, kernel="triton"
        )

    check_steps(run, want, case.slots[0], 1e-5)
