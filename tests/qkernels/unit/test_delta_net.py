"""The gated delta net in plain torch: transformers' recurrence, chunks, slots, wrong arguments."""

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearRMSNormGated,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    torch_recurrent_gated_delta_rule,
)

from qkernels import ops
from qkernels.delta_net import chunked, reference
from qkernels.delta_net.config import chunk_config
from qkernels.errors import KernelError
from tests.qkernels.delta_net_case import DeltaCase, assert_close
from tests.qkernels.verify_case import MAX_ROWS, NUM_ROWS, check_steps, with_noise

SIZES = {"J": 2, "H": 6, "K": 12, "V": 20}


@pytest.fixture
def case():
    """Requests that begin, that go on, that have no slot, that have no rows."""
    return DeltaCase(counts=(1, 70, 3, 0, 129, 1), before=(9, 0, 2, 5, 64, 0), **SIZES)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_reference_equals_transformers_recurrence(factor):
    """Also where a token writes up to twice its value (OLMo-Hybrid)."""
    case = DeltaCase(counts=(67,), before=(0,), dtype=torch.float64, **SIZES)
    memory = case.memory_PHKV.clone()
    o_THV = reference.delta_rule_(*case.rule, memory, case.step, write_factor=factor)
    q, k, v = case.mixed_TC.split([24, 24, 120], 1)
    o, last = torch_recurrent_gated_delta_rule(
        *(x.unflatten(1, (-1, size))[None].float() for x, size in ((q, 12), (k, 12), (v, 20))),
        g=(-case.a_log_H.exp() * torch.nn.functional.softplus(case.a_TH + case.dt_bias_H))[None],
        beta=factor * case.b_TH.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert_close("o", o[0], o_THV, 1e-6)
    assert_close("state", last[0], memory[case.slots[0]], 1e-6)


@pytest.mark.parametrize("bound", [0.0, -5.0])
def test_channelwise_decay_equals_transformers_recurrence(bound):
    """Also where the log of a decay is bounded (Ling 3)."""
    sizes = {"J": 3, "H": 3, "K": 12, "V": 20, "by_channel": True}
    case = DeltaCase(counts=(67,), before=(0,), dtype=torch.float64, **sizes)
    memory = case.memory_PHKV.clone()
    o_THV = reference.delta_rule_(*case.rule, memory, case.step, decay_bound=bound)
    q, k, v = case.mixed_TC.split([36, 36, 60], 1)
    inputs = (case.a_TH + case.dt_bias_H).unflatten(1, (3, 12))
    rates = case.a_log_H.exp()[:, None]
    g = bound * (rates * inputs).sigmoid()
    if not bound:
        g = -rates * torch.nn.functional.softplus(inputs)
    o, last = recurrent_kimi_delta_attention(
        *(x.unflatten(1, (-1, size))[None].float() for x, size in ((q, 12), (k, 12), (v, 20))),
        g=g[None],
        beta=case.b_TH.sigmoid()[None],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert_close("o", o[0], o_THV, 1e-6)
    assert_close("state", last[0], memory[case.slots[0]], 1e-6)


def test_sigmoid_norm_equals_transformers():
    norm = KimiLinearRMSNormGated(20, eps=1e-3)
    norm.weight.data.normal_()
    x, z = torch.randn(2, 37, 6, 20, generator=torch.Generator().manual_seed(1))
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 0)):
        own = [each.to(dtype) for each in (x, z, norm.weight)]
        with torch.no_grad():
            want = norm.to(dtype)(*own[:2])
            assert_close("norm", want, ops.gated_rms_norm(*own, 1e-3, sigmoid=True), limit)


def test_reference_norm_equals_transformers():
    norm = Qwen3NextRMSNormGated(20, eps=1e-3)
    norm.weight.data.normal_()
    x, z = torch.randn(2, 37, 6, 20, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close("norm", norm(x, z), ops.gated_rms_norm(x, z, norm.weight, 1e-3), 1e-6)


@pytest.mark.parametrize(
    "given", [{}, {"write_factor": 2.0}, {"decay_bound": -5.0}], ids=["plain", "twice", "bounded"]
)
@pytest.mark.parametrize("by_channel", [False, True])
def test_chunked_rule_equals_recurrence(case, by_channel, given):
    """Also for requests that continue within a chunk, and next to decode rows."""
    if by_channel:
        case = DeltaCase(counts=case.counts, before=case.before, **SIZES, by_channel=True)
    wide = case.to(torch.float64)
    want, got = wide.memory_PHKV.clone(), wide.memory_PHKV.clone()
    o_want = reference.delta_rule_(*wide.rule, want, wide.step, **given)
    o_got = chunked.delta_rule_(*wide.rule, got, wide.step, **given)
    assert_close("o", o_want, o_got, 1e-11)
    assert_close("states", want, got, 1e-11)


@pytest.mark.parametrize("module", [reference, chunked])
def test_chunked_prompt_equals_whole_prompt(module):
    """A prompt in chunks of odd lengths, the last of one token: as the whole."""
    whole = DeltaCase(counts=(75,), before=(0,), dtype=torch.float64, **SIZES)
    memory = whole.memory_PHKV.clone()
    o = module.delta_rule_(*whole.rule, memory, whole.step)
    memory_cut, start = whole.memory_PHKV.clone(), 0
    for count in (2, 1, 40, 31, 1):
        part = whole.rows(start, count)
        o_part = module.delta_rule_(*part.rule, memory_cut, part.step)
        assert_close("o", o[start : start + count], o_part, 1e-11)
        start += count
    assert start == 75
    assert_close("states", memory, memory_cut, 1e-11)


@pytest.mark.parametrize("module", [reference, chunked])
def test_other_slots_are_unchanged(module, case):
    """Slots without a request of the step are unchanged; a row and a prompt without a slot write
    nowhere, not even into the last slot."""
    memory = case.memory_PHKV.clone()
    slots = [-1, -1, 3, 5, 0, 4]
    case = case.with_slots(slots)
    module.delta_rule_(*case.rule, memory, case.step)
    written = {slot for slot, count in zip(slots, case.counts, strict=True) if count} - {-1}
    for slot in range(len(memory)):
        assert torch.equal(memory[slot], case.memory_PHKV[slot]) == (slot not in written)


@pytest.mark.parametrize("module", [reference, chunked])
def test_earlier_contents_of_a_slot_are_not_read(module):
    """A request that begins, and one without a slot: NaN of an earlier owner does not come in."""
    case = DeltaCase(counts=(1, 5, 1), before=(0, 0, 7), **SIZES).with_slots([0, 1, -1])
    memory = case.memory_PHKV.fill_(torch.nan)
    assert module.delta_rule_(*case.rule, memory, case.step).isfinite().all()
    assert memory[:2].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixed_TC": lambda x: x[:, :-1]}, "mixed.*6 x 20 values, found 167 channels"),
        ({"b_TH": lambda x: x[:, :-1]}, r"delta_rule_ b: expected \[205, 6\]"),
        ({"a_log_H": lambda x: x.bfloat16()}, "a_log: expected torch.float32"),
        ({"dt_bias_A": lambda x: x[:-1]}, "dt_bias: expected 6 or .* numbers, found 5"),
        ({"a_TA": lambda x: x[:, :-1]}, r"delta_rule_ a: expected \[205, 6\]"),
        ({"memory_PHKV": lambda x: x.transpose(2, 3)}, "expected"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    case = DeltaCase(counts=(76, 129), before=(0, 0), **SIZES)
    arguments = dict(
        zip(("mixed_TC", "b_TH", "a_TA", "a_log_H", "dt_bias_A"), case.rule, strict=True)
    )
    arguments["memory_PHKV"] = case.memory_PHKV
    for name, changed in change.items():
        arguments[name] = changed(arguments[name])
    with pytest.raises(KernelError, match=message):
        ops.delta_rule_(**arguments, step=case.step)


@pytest.mark.parametrize("factor", [0.0, 2.5])
def test_factor_with_growing_states_is_refused(factor):
    case = DeltaCase(counts=(3,), before=(0,), **SIZES)
    with pytest.raises(KernelError, match="write_factor: expected above 0, at most 2, found"):
        ops.delta_rule_(*case.rule, case.memory_PHKV, case.step, write_factor=factor)


@pytest.mark.parametrize(("bound", "by_channel"), [(-5.0, False), (1.0, True), (-51.0, True)])
def test_unsupported_decay_bound_is_refused(bound, by_channel):
    case = DeltaCase(counts=(3,), before=(0,), **SIZES, by_channel=by_channel)
    with pytest.raises(KernelError, match="decay_bound: expected 0, or at least -50 with decays"):
        ops.delta_rule_(*case.rule, case.memory_PHKV, case.step, decay_bound=bound)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "cpu"])
def test_states_are_multiplied_with_float32_range(arch):
    """float16 would hold neither a large state nor large values."""
    operands = {
        dtype: chunk_config(128, 128, dtype, arch).operands
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    assert operands.pop(torch.bfloat16) == torch.bfloat16
    assert set(operands.values()) == {torch.float32}


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("module", [reference, chunked])
def test_rejected_rows_are_not_in_state(module, by_channel):
    sizes = {"J": 2, "H": 4, "K": 12, "V": 20, "by_channel": by_channel}
    case = DeltaCase(counts=(NUM_ROWS,), before=(0,), **sizes)
    wide = case.to(torch.float64)
    want = reference.delta_rule_(*wide.rule, wide.memory_PHKV.clone(), wide.step)
    memory = torch.full_like(case.memory_PHKV, torch.nan)
    shape = len(memory), 2 * MAX_ROWS, reference.recent_width(24, 80, 4, 48 if by_channel else 4)
    recent = torch.full(shape, torch.nan)

    def run(rows, num_rejected, step):
        made = (with_noise(x, rows, num_rejected) for x in case.rule[:3])
        return module.delta_rule_(*made, *case.rule[3:], memory, step, recent)

    check_steps(run, want, case.slots[0], 1e-5)
