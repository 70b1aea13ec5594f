"""The gated delta net's kernels against the recurrence in float64: odd sizes, several requests of
different lengths in one step, states carried on."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.delta_net import reference, triton_delta
from qkernels.delta_net.config import chunk_config
from tests.qkernels.delta_net_case import DeltaCase
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

SIZES = {"J": 2, "H": 4, "K": 12, "V": 20}
WIDE = {"H": 2, "V": 40}  # values of more than one program
# Counts and tokens before: requests that begin, that go on, that are not there.
STEPS = {
    "decode": ((1, 1, 1, 0, 1), (0, 9, 1, 3, 200)),
    "prompts": ((1, 35, 3, 0, 17), (9, 0, 2, 5, 64)),
    "one": ((21,), (0,)),
}
WITHOUT_SLOT = 4  # of "decode" and "prompts"


def make(name, dtype, device, **sizes):
    counts, before = STEPS[name]
    case = DeltaCase(counts=counts, before=before, **{**SIZES, **sizes})
    slots = [-1 if r == WITHOUT_SLOT else slot for r, slot in enumerate(case.slots)]
    return case.with_slots(slots).to(dtype, device)


def unread(case, states):
    """Return states with NaN in every slot that no request of the step continues."""
    states = states.clone()
    going = [s for s, before in zip(case.slots, case.before, strict=True) if before and s >= 0]
    others = [slot for slot in range(len(states)) if slot not in going]
    states[others] = torch.nan
    return states


@pytest.mark.parametrize(
    ("name", "factor"), [*((name, 1.0) for name in STEPS), ("decode", 2.0), ("prompts", 2.0)]
)
@pytest.mark.parametrize("wide_rows", [True, False], ids=["float32", "half"])
def test_delta_rule_equals_recurrence(device, half, poison, assert_close, name, factor, wide_rows):
    """`factor` 2: tokens write up to twice their value, and states turn their sign."""
    dtype = torch.float32 if wide_rows else half
    case = make(name, dtype, device, **(WIDE if name != "prompts" else {}))
    wide = case.to(torch.float64, device)
    want_states, got_states = unread(wide, wide.memory_PHKV), unread(case, case.memory_PHKV)
    want = reference.delta_rule_(*wide.rule, want_states, wide.step, write_factor=factor)
    got = ops.delta_rule_(*case.rule, got_states, case.step, kernel="triton", write_factor=factor)
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    assert_close("o", want, got, limit)
    owned = [s for s, n in zip(case.slots, case.counts, strict=True) if n and s >= 0]
    assert_close("states", want_states[owned], got_states[owned], limit)
    rest = [slot for slot in range(len(got_states)) if slot not in owned]
    left = unread(case, case.memory_PHKV)[rest]
    assert torch.equal(got_states[rest].nan_to_num(7), left.nan_to_num(7))


def test_chunks_then_single_tokens_equal_recurrence(device, poison, assert_close):
    """A prompt in chunks of odd lengths, then token by token: as the recurrence of the whole."""
    whole = DeltaCase(counts=(42,), before=(0,), **SIZES).to(torch.float32, device)
    wide = whole.to(torch.float64, device)
    want_state, state, start = wide.memory_PHKV.clone(), whole.memory_PHKV.clone(), 0
    want = reference.delta_rule_(*wide.rule, want_state, wide.step)
    for count in (20, 17, 3, 1, 1):
        part = whole.rows(start, count)
        rows = slice(start, start + count)
        got = ops.delta_rule_(*part.rule, state, part.step, kernel="triton")
        assert_close(f"o of {rows}", want[rows], got, 1e-5)
        start += count
    assert start == 42
    assert_close("state", want_state[whole.slots], state[whole.slots], 1e-5)


def test_rows_of_a_wider_matrix(device, half, poison, assert_close):
    """As in the block: queries, keys, values and z in one matrix, b and a in another."""
    case = make("one", half, device)
    T, C = case.mixed_TC.shape
    beside = torch.full((T, C + 80), torch.nan, dtype=half, device=device)
    beside[:, :C] = case.mixed_TC
    gates = torch.cat([case.b_TH, case.a_TH], 1)
    views = beside[:, :C], *gates.chunk(2, 1), case.a_log_H, case.dt_bias_H
    got = ops.delta_rule_(*views, case.memory_PHKV.clone(), case.step, kernel="triton")
    want = ops.delta_rule_(*case.rule, case.memory_PHKV.clone(), case.step, kernel="triton")
    assert torch.equal(got, want)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_equal_keys(device, poison, assert_close, factor):
    """All keys are equal and nothing decays: the worst case of the triangular system."""
    case = DeltaCase(counts=(48,), before=(0,), **SIZES).to(torch.float32, device)
    case.mixed_TC[:, 24:48] = case.mixed_TC[0, 24:48]
    case.a_log_H.fill_(-20.0)
    case.b_TH.fill_(6.0)
    wide = case.to(torch.float64, device)
    given = {"write_factor": factor}
    want = reference.delta_rule_(*wide.rule, wide.memory_PHKV.clone(), wide.step, **given)
    for kernel in ("triton", "chunked"):
        memory = case.memory_PHKV.clone()
        got = ops.delta_rule_(*case.rule, memory, case.step, kernel=kernel, **given)
        assert_close(kernel, want, got, 1e-4)


@pytest.mark.parametrize("V", [20, 33])
def test_norm_rounds_where_the_reference_does(device, half, poison, V):
    generator = torch.Generator().manual_seed(0)
    x, wide = (torch.randn(5, n, V, generator=generator).to(device, half) for n in (6, 9))
    z, weight = wide[:, :6], torch.randn(V, generator=generator).to(device, half)
    got = ops.gated_rms_norm(x, z, weight, 1e-3, kernel="triton")
    want = ops.gated_rms_norm(x, z, weight, 1e-3, kernel="reference")
    # silu is in float32 on both sides: a last bit
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(half).eps, atol=1e-6)


# Tiles of products of 16 bits, as bfloat16 takes them on a GPU.
HALF_TILES = {"rows 64": {"rows": 64}, "rows 32": {"rows": 32, "columns": 16}}


# Relative errors of products in 16 bits, and of a chunk's inverse in float16.
HALF_LIMITS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


def half_operands(monkeypatch, half, **tiles):
    """From now on prompts are multiplied in `half`, sums aside."""

    def config(*args):
        return replace(chunk_config(*args), operands=half, **tiles)

    monkeypatch.setattr(triton_delta, "chunk_config", config)


@pytest.mark.parametrize("tiles", HALF_TILES)
def test_16_bit_operands(device, half, poison, assert_close, monkeypatch, tiles):
    half_operands(monkeypatch, half, **HALF_TILES[tiles])
    test_delta_rule_equals_recurrence(device, half, poison, assert_close, "prompts", 1.0, False)


@pytest.mark.parametrize("is_half", [False, True])
def test_every_length(device, half, poison, assert_close, monkeypatch, is_half):
    """Requests of 1 to 200 rows side by side, at the edges of chunks of 16, 32 and 64 rows."""
    if is_half:
        half_operands(monkeypatch, half, rows=64)
    counts = (64, 1, 15, 128, 16, 2, 17, 0, 63, 1, 65, 31, 200, 33, 32, 129, 127)
    before = tuple(7 * (r % 3) for r in range(len(counts)))
    case = DeltaCase(counts=counts, before=before, J=1, H=2, K=16, V=8)
    case = case.to(half if is_half else torch.float32, device)
    wide = case.to(torch.float64, device)
    want_states, got_states = wide.memory_PHKV.clone(), case.memory_PHKV.clone()
    want = reference.delta_rule_(*wide.rule, want_states, wide.step)
    got = ops.delta_rule_(*case.rule, got_states, case.step, kernel="triton")
    limit, start = HALF_LIMITS[half] if is_half else 1e-5, 0
    for count, slot in zip(counts, case.slots, strict=True):
        if count:
            rows = slice(start, start + count)
            assert_close(f"o of {count} rows", want[rows], got[rows], limit)
            assert_close(f"state of {count} rows", want_states[slot], got_states[slot], limit)
        start += count


def test_many_requests_with_few_rows(device, poison, assert_close):
    """More requests than a program looks at together to find its own."""
    counts = [0] * 300
    counts[3], counts[127], counts[128], counts[290] = 20, 1, 35, 3
    sizes = {"J": 1, "H": 1, "K": 8, "V": 8}
    case = DeltaCase(counts=counts, before=[0] * 300, **sizes).to(torch.float32, device)
    wide = case.to(torch.float64, device)
    want = reference.delta_rule_(*wide.rule, wide.memory_PHKV.clone(), wide.step)
    got = ops.delta_rule_(*case.rule, case.memory_PHKV.clone(), case.step, kernel="triton")
    assert_close("o", want, got, 1e-5)


def test_heads_of_more_than_128(device, poison, assert_close):
    sizes = {"J": 1, "H": 1, "K": 136, "V": 130}
    case = DeltaCase(counts=(70,), before=(5,), **sizes).to(torch.float32, device)
    wide = case.to(torch.float64, device)
    want = reference.delta_rule_(*wide.rule, wide.memory_PHKV.clone(), wide.step)
    got = ops.delta_rule_(*case.rule, case.memory_PHKV.clone(), case.step, kernel="triton")
    assert_close("o", want, got, 1e-5)


@pytest.mark.parametrize("is_half", [False, True])
def test_full_decay_keeps_later_tokens_accurate(
    device, half, poison, assert_close, monkeypatch, is_half
):
    """After a token with a decay of exp(-1e6), small decays of other tokens still count."""
    if is_half:
        half_operands(monkeypatch, half, rows=64)
    case = DeltaCase(counts=(80,), before=(3,), **SIZES)
    case.a_TH[[5, 40, 41]] = 6e4
    case.a_log_H.fill_(2.7)
    case.dt_bias_H.fill_(-7.0)
    case = case.to(half if is_half else torch.float32, device)
    wide = case.to(torch.float64, device)
    want = reference.delta_rule_(*wide.rule, wide.memory_PHKV.clone(), wide.step)
    got = ops.delta_rule_(*case.rule, case.memory_PHKV.clone(), case.step, kernel="triton")
    assert_close("o", want, got, HALF_LIMITS[half] if is_half else 1e-4)


def test_equal_keys_in_16_bits(device, half, poison, assert_close, monkeypatch):
    """The inverse stays small there, so float16 holds it."""
    half_operands(monkeypatch, half, rows=64)
    case = DeltaCase(counts=(64,), before=(0,), **SIZES)
    case.mixed_TC[:, 24:48] = case.mixed_TC[0, 24:48]
    case.a_log_H.fill_(-20.0)
    case.b_TH.fill_(6.0)
    case = case.to(half, device)
    wide = case.to(torch.float64, device)
    want = reference.delta_rule_(*wide.rule, wide.memory_PHKV.clone(), wide.step)
    got = ops.delta_rule_(*case.rule, case.memory_PHKV.clone(), case.step, kernel="triton")
    assert_close("o", want, got, 4 * HALF_LIMITS[half])


def test_rejected_rows_are_not_in_state(device, poison):
    sizes = {"J": 2, "H": 4, "K": 12, "V": 20}
    case = DeltaCase(counts=(NUM_ROWS,), before=(0,), **sizes).to(torch.float32, device)
    wide = case.to(torch.float64, device)
    want = reference.delta_rule_(*wide.rule, wide.memory_PHKV.clone(), wide.step)
    memory = torch.full_like(case.memory_PHKV, torch.nan)
    shape = len(memory), 2 * MAX_ROWS, reference.recent_width(24, 80, 4)
    recent = torch.full(shape, torch.nan, device=device)

    def run(rows, num_rejected, step):
        made = (with_noise(x, rows, num_rejected) for x in case.rule[:3])
        return ops.delta_rule_(*made, *case.rule[3:], memory, step, recent, kernel="triton")

    check_steps(run, want, case.slots[0], 1e-5)
