"""W4A8 for sm_90 without a GPU: the kernel's source in plain torch against exact products."""

import dataclasses
import functools
import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from qkernels.w4a8 import layout, sm90
from qkernels.w4a8.config import W4A8Sm90Config
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


@pytest.mark.parametrize("name", ["w4a8-g32", "w4a8-g64", "w4a8-fp8-g64"])
def test_sums_of_short_groups_are_exact(name, multiply, poison):
    case = exact_case(name, 100, 200, 512, torch.device("cpu"))
    assert torch.equal(multiply(case, TWO), case[-1].to(torch.bfloat16))
