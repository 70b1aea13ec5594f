"""W4A8 for sm_90 without a GPU: the kernel's source in plain torch against exact products."""

import dataclasses
import functools
import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from qkernels.tuning.table import TuningRow, TuningTable
from qkernels.w4a8 import config as configs
from qkernels.w4a8 import layout, sm90
from qkernels.w4a8.config import W4A8Sm90Config
from qkernels.w4a8.tuned import TUNED
from tests.qkernels import plain_gluon
from tests.qkernels.w4a8_case import exact_case

BLOCKS = 2  # blocks of a grid: a block computes several tiles


def expanded(asm, words, multiples=None, biases=None):
    """Plain twins of the PTX in layout.py: (low codes, high codes) of packed words."""
    if asm == layout.MULTIPLES_PTX:
        return tuple(of_multiples(words >> shift, multiples, biases) for shift in (0, 4))
    codes = words.view(torch.uint8)
    nibbles = torch.stack([codes & 15, codes >> 4]).to(torch.int16)
    if asm == layout.INT8_PTX:
        found = ((nibbles - 8) * 16).to(torch.int8).view(torch.int32)
    else:
        assert asm == layout.FLOAT8_PTX
        negative = nibbles >= 8
        magnitude = torch.where(negative, nibbles - 7, nibbles)
        found = (magnitude + 128 * negative).to(torch.uint8).view(torch.int32)
    return found[0], found[1]


def of_multiples(words, multiples, biases):
    """One multiply-add of 32 bits and a xor, as the instructions compute."""
    sums = (words.long() & 0x0F0F0F0F) * multiples.long() + biases.long()
    return ((sums ^ 0x80808080) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


@pytest.fixture
def multiply(monkeypatch):
    """Run the kernel's source on a CPU."""
    launch = functools.partial(plain_gluon.launch, asm=expanded)
    monkeypatch.setattr(sm90, "launch", launch)
    monkeypatch.setattr(sm90, "descriptor", plain_gluon.Descriptor)
    monkeypatch.setattr(sm90, "sm_count", lambda device: BLOCKS)

    def multiply(case, config):
        codes_MK, scales_M1, packed, _ = case
        weight = sm90.prepare_weight(packed, torch.bfloat16)
        weight = dataclasses.replace(weight, activation=packed.activation)
        return sm90.linear_codes(codes_MK, scales_M1, weight, config=config)

    return multiply


TWO = W4A8Sm90Config(num_consumers=2, block_b=64)
CONFIGS = {
    "whole": TWO,
    "ahead": dataclasses.replace(TWO, block_b=32, loads_ahead=True),
}
SHAPES = [(5, 40, 384), (140, 328, 512)]  # the second: several tiles for each block
NAMES = ("w4a8", "w4a8-fp8", "w4a8-g256", "w4a8-fp8-channel")
QUICK = (
    *itertools.product(("w4a8",), CONFIGS),
    *itertools.product(NAMES[1:], ("whole", "ahead")),
)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.exhaustive)
        for each in itertools.product(NAMES, CONFIGS)
    ],
)
def test_sums_are_exact(name, config, multiply, poison):
    for M, N, K in SHAPES:
        if name == "w4a8-g256" and K % 256:
            continue  # not whole groups
        case = exact_case(name, M, N, K, torch.device("cpu"))
        assert torch.equal(multiply(case, CONFIGS[config]), case[-1].to(torch.bfloat16)), (M, N, K)


INTEGERS = {
    "two consumers": dataclasses.replace(TWO, promotes=False),
    "wide": dataclasses.replace(TWO, block_b=256, promotes=False),
    "few rows": dataclasses.replace(TWO, num_consumers=1, block_b=16, promotes=False),
}


@pytest.mark.parametrize("config", INTEGERS)
@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g256"])
def test_sums_of_multiples_are_exact(name, config, multiply, poison):
    config = INTEGERS[config]
    rows = min(140, 2 * config.block_b + 12)  # several tiles for each block, the last one partial
    for M, N, K in ((5, 40, 768), (rows, 328, 512)):
        case = exact_case(name, M, N, K, torch.device("cpu"), multiples=True)
        found = multiply(case, config)
        assert torch.equal(found, case[-1].to(torch.bfloat16)), (M, N, K)


@pytest.mark.parametrize("name", ["w4a8-g512", "w4a8-channel"])
def test_single_group_is_one_scale_per_output(name, multiply, poison):
    case = exact_case(name, 20, 72, 512, torch.device("cpu"), multiples=True)
    assert torch.equal(multiply(case, INTEGERS["few rows"]), case[-1].to(torch.bfloat16))


def test_every_code_times_every_multiple():
    """One word of eight codes: no byte carries into the next one."""
    codes = torch.randint(0, 16, (31 * 256, 8))
    codes[:256] = torch.tensor(list(itertools.product((0, 15), repeat=8)))
    multiples = torch.arange(-15, 16).repeat_interleave(256)
    words = (codes << torch.arange(0, 32, 4)).sum(1).to(torch.uint32).view(torch.int32)
    biases = (multiples * layout.BIAS_STEP + layout.BIAS).to(torch.int32)
    low, high = expanded(layout.MULTIPLES_PTX, words, multiples, biases)
    want = (codes - 8) * multiples[:, None]
    assert torch.equal(low.view(torch.int8).view(-1, 4).long(), want[:, 0::2])
    assert torch.equal(high.view(torch.int8).view(-1, 4).long(), want[:, 1::2])


def test_golden_word_of_multiples():
    """The example of notes/w4a8.md."""
    word, multiple = torch.tensor([0xF0F0F0F0 - 2**32], dtype=torch.int32), torch.tensor([15])
    biases = multiple * layout.BIAS_STEP + layout.BIAS
    low, high = expanded(layout.MULTIPLES_PTX, word, multiple, biases)
    assert (low.item() & 0xFFFFFFFF, high.item() & 0xFFFFFFFF) == (0x88888888, 0x69696969)


@pytest.mark.parametrize("name", ["w4a8-g32", "w4a8-g64", "w4a8-fp8-g64"])
def test_sums_of_short_groups_are_exact(name, multiply, poison):
    case = exact_case(name, 100, 200, 512, torch.device("cpu"))
    assert torch.equal(multiply(case, TWO), case[-1].to(torch.bfloat16))


def test_plan_depends_on_scales(monkeypatch):
    """Multiples have the configs of one scale per output, also measured ones."""
    table = TuningTable(gpu="cpu")
    monkeypatch.setattr(sm90, "sm_count", lambda device: 132)
    monkeypatch.setattr(sm90, "tuning_table_of", lambda device: table)

    def plan(name, multiples, kernel=None):
        packed = exact_case(name, 1, 512, 1024, torch.device("cpu"), multiples)[2]
        weight = sm90.prepare_weight(packed, torch.bfloat16)
        weight = dataclasses.replace(weight, activation=packed.activation, requested=kernel)
        return sm90.plan(weight.problem, 8192)

    for name in ("w4a8", "w4a8-g32", "w4a8-g256"):
        found, other = plan(name, True), plan(name, False)
        assert (found.variant, found.config.promotes) == (configs.MULTIPLES, False)
        assert (other.variant, other.config.promotes) == ("sm90", True)
        assert not plan(name, True, "fixed_order").config.promotes
    assert plan("w4a8-fp8", True).config.promotes, "float8 sums have a total"
    measured = dataclasses.replace(INTEGERS["wide"], group_a=16)
    problem = {"M": 8192, "N": 512, "K": 1024, "group": 1024, "integers": True}
    row = TuningRow(
        op=TUNED, problem=problem, config=measured, microseconds=1.0, default_microseconds=None
    )
    table.add_(row)
    assert plan("w4a8", True).config == measured
    assert plan("w4a8", False).config != measured
