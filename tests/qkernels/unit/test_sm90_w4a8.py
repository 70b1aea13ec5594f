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


def expanded(asm, words):
    """Plain twins of layout.INT8_PTX and FLOAT8_PTX: (low codes, high codes) of packed words."""
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
THREE = dataclasses.replace(TWO, num_consumers=3)
PARTS = {
    "two parts": dataclasses.replace(TWO, product_columns=32),
    "two parts, first turns": dataclasses.replace(TWO, product_columns=32, turns="first"),
    "four parts": dataclasses.replace(TWO, block_b=128, product_columns=32),
    "four parts, all turns": dataclasses.replace(
        TWO, block_b=128, product_columns=32, turns="every"
    ),
    "two parts of 64, first turns": dataclasses.replace(
        TWO, block_b=128, product_columns=64, turns="first"
    ),
    "three consumers, first turns": dataclasses.replace(THREE, product_columns=32, turns="first"),
    "three consumers, all turns": dataclasses.replace(THREE, product_columns=32, turns="every"),
    "one consumer": dataclasses.replace(TWO, num_consumers=1, product_columns=32),
}
CONFIGS = {
    "whole": TWO,
    "ahead": dataclasses.replace(TWO, block_b=32, loads_ahead=True),
    "ahead, first turns": dataclasses.replace(TWO, loads_ahead=True, turns="first"),
    "ahead, all turns": dataclasses.replace(TWO, loads_ahead=True, turns="every"),
    "three stages": dataclasses.replace(TWO, max_stages=3, product_columns=32, turns="first"),
    **PARTS,
}
SHAPES = [(5, 40, 384), (140, 328, 512)]  # the second: several tiles for each block
NAMES = ("w4a8", "w4a8-fp8", "w4a8-g256", "w4a8-fp8-channel")
QUICK = (
    *itertools.product(("w4a8",), CONFIGS),
    *itertools.product(NAMES[1:], ("whole", "four parts, all turns")),
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


@pytest.mark.parametrize("name", ["w4a8-g32", "w4a8-g64", "w4a8-fp8-g64"])
def test_sums_of_short_groups_are_exact(name, multiply, poison):
    case = exact_case(name, 100, 200, 512, torch.device("cpu"))
    assert torch.equal(multiply(case, TWO), case[-1].to(torch.bfloat16))
    with pytest.raises(AssertionError):  # a K step has several scales
        multiply(case, PARTS["two parts"])


@pytest.mark.parametrize("name", ["w4a8", pytest.param("w4a8-fp8", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("config", PARTS)
def test_parts_have_the_bits_of_whole_products(name, config, multiply):
    """Scales and inputs of any value: sums are rounded, in the same order."""
    codes_MK, scales_M1, packed, want = exact_case(name, 100, 200, 512, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    scales_NG = torch.rand(packed.scales_NG.shape, generator=generator) / 100
    scales_M1 = torch.rand(scales_M1.shape, generator=generator)
    case = codes_MK, scales_M1, dataclasses.replace(packed, scales_NG=scales_NG.half()), want
    whole = multiply(case, TWO)
    assert whole.unique().numel() > 1000
    assert torch.equal(multiply(case, PARTS[config]), whole)


def test_a_request_decides_whether_products_run_in_parts(monkeypatch):
    """Also if the tuning table has a config of the variant."""
    table = TuningTable(gpu="cpu")
    monkeypatch.setattr(sm90, "sm_count", lambda device: 132)
    monkeypatch.setattr(sm90, "tuning_table_of", lambda device: table)
    _, _, packed, _ = exact_case("w4a8", 1, 4096, 1024, torch.device("cpu"))
    weight = sm90.prepare_weight(packed, torch.bfloat16)

    def in_parts(kernel):
        requested = dataclasses.replace(weight, activation=packed.activation, requested=kernel)
        plan = sm90.plan(requested.problem, 8192)
        assert plan.variant == (configs.PARTS if plan.config.product_columns else "sm90")
        return plan.variant == configs.PARTS

    default = configs.PARTS_BY_DEFAULT
    assert in_parts(configs.PARTS) and not in_parts(f"-{configs.PARTS}")
    assert in_parts(None) == in_parts("sm90_w4a8") == in_parts("fixed_order") == default
    for config, found in ((PARTS["two parts"], True), (TWO, False)):
        problem = {"M": 8192, "N": 4096, "K": 1024, "group": 128, "integers": True}
        table.add_(
            TuningRow(
                op=TUNED,
                problem=problem,
                config=config,
                microseconds=1.0,
                default_microseconds=None,
            )
        )
        assert in_parts(None) == found, "the measured config"
        assert in_parts(configs.PARTS) and not in_parts(f"-{configs.PARTS}")
