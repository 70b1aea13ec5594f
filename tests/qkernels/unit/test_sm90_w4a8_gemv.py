"""W4A8 of few rows for sm_90 without a GPU: the kernel's source in plain torch, and its configs."""

import dataclasses
import functools
import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from qkernels.tuning.table import TuningRow, TuningTable
from qkernels.w4a8 import gemv_config, layout, sm90, sm90_gemv
from qkernels.w4a8.gemv_config import (
    GEMV,
    GEMV_DEFAULT_ROWS,
    GEMV_MAX_ROWS,
    W4A8GemvConfig,
    default_gemv_config,
    gemv_config_fault,
)
from qkernels.w4a8.tuned import TUNED
from tests.qkernels import plain_gluon
from tests.qkernels.plain_gluon import tensor
from tests.qkernels.w4a8_case import exact_case

CPU = torch.device("cpu")
CONFIGS = {
    "default": W4A8GemvConfig(),
    "whole": W4A8GemvConfig(warps=2, steps_in_flight=1, block_n=32),
    "whole, four in flight": W4A8GemvConfig(warps=1, steps_in_flight=4),
    "four in flight": W4A8GemvConfig(warps=4, steps_in_flight=4, block_n=64),
    "16 rows": W4A8GemvConfig(block_m=16, warps=2, block_n=64),
}
NAMES = ("w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g256", "w4a8-channel")


def signed_nibbles(codes):
    """Plain twin of gpu/registers.py: 16 (q - 8) of the low and the high code of each byte."""
    bytes_ = codes.view(torch.uint8).to(torch.int16)
    return tuple(((half - 8) * 16).to(torch.int8) for half in (bytes_ & 15, bytes_ >> 4))


def multiply_int8(a, b, sums):
    """Plain mma_v2: sums of the integer tensor core saturate."""
    product = a.to(torch.float64) @ b.to(torch.float64) + sums.to(torch.float64)
    return tensor(product.clamp(-(2**31), 2**31 - 1).to(torch.int32))


@pytest.fixture
def multiply(monkeypatch):
    """Run the kernel's source on a CPU."""
    fakes = {"signed_nibbles": signed_nibbles, "mma_v2": multiply_int8}
    launch = functools.partial(plain_gluon.launch, fakes=fakes)
    monkeypatch.setattr(sm90_gemv, "launch", launch)
    monkeypatch.setattr(sm90, "sm_count", lambda device: 132)

    def multiply(case, config, bias=None):
        codes_MK, scales_M1, packed, _ = case
        weight = sm90.prepare_weight(packed, torch.bfloat16)
        weight = dataclasses.replace(weight, activation=packed.activation)
        return sm90.linear_codes(codes_MK, scales_M1, weight, bias, config=config)

    return multiply


@pytest.mark.parametrize("multiples", [False, True], ids=["scales", "multiples"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", NAMES)
def test_sums_are_exact(name, config, multiples, multiply, poison):
    """3, 4 and 6 K steps: fewer than some blocks request together, and whole multiples."""
    for M, N, K in ((1, 40, 512), (5, 72, 768), (8, 24, 384), (11, 136, 512)):
        if (name == "w4a8-g256" and K % 256) or CONFIGS[config].block_m < M:
            continue
        case = exact_case(name, M, N, K, CPU, multiples)
        found = multiply(case, CONFIGS[config])
        assert torch.equal(found, case[-1].to(torch.bfloat16)), (M, N, K)


def test_bias_is_added_before_rounding(multiply, poison):
    case = exact_case("w4a8", 3, 72, 512, CPU)
    bias_N = torch.randn(72, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    want = (case[-1].float() + bias_N.float()).to(torch.bfloat16)
    assert torch.equal(multiply(case, W4A8GemvConfig(warps=2), bias_N), want)


@pytest.mark.parametrize("name", ["w4a8", "w4a8-channel"])
def test_largest_sums_fit_their_registers(name, multiply, poison):
    """Each warp has as many K steps as a config may give it, of products of one sign."""
    config = W4A8GemvConfig(warps=2, steps_in_flight=1)
    K = config.warps * gemv_config.MAX_WARP_STEPS * layout.K_STEP
    codes_MK, scales_M1, packed, _ = exact_case(name, 2, 16, K, CPU, multiples=name == "w4a8")
    codes_MK[0], codes_MK[1] = -128, 127
    packed.words_NW[:] = 0  # all codes are 0, the value -8
    if name == "w4a8":
        packed.scales_NG[:] = 15 / 64
    problem = {"M": 2, "N": 16, "K": K, "group": K}
    assert gemv_config_fault(config, **problem) is None
    exact = codes_MK.double() * scales_M1.double() @ packed.dequantize(torch.float64).t()
    found = multiply((codes_MK, scales_M1, packed, None), config)
    assert torch.equal(found, exact.to(torch.bfloat16))
    assert "32 bits" in gemv_config_fault(config, **problem | {"K": K + layout.K_STEP})


def test_stored_codes_are_in_the_order_of_inputs():
    """Lane t of a row has inputs 16 i + 4 t .. + 3, which operand B reads from x as it is."""
    codes_1K = torch.randint(0, 16, (1, 128), dtype=torch.uint8)
    packed = layout.tiles_of_codes(codes_1K, "int", 128)[0, 0, :1]
    low, high = signed_nibbles(packed)
    # [lane t, word j, byte b] of each half h; int8_values reads it as 32 j + 16 h + 4 t + b
    halves = torch.stack([low, high], -1).view(4, 4, 4, 2)
    assert torch.equal(halves.permute(1, 3, 0, 2).reshape(1, 128), (codes_1K.char() - 8) * 16)


SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SHAPES |= {"small": (8, 128), "odd": (1160, 2944), "long": (64, 32768)}


@pytest.mark.parametrize("shape", SHAPES)
def test_default_configs_are_valid(shape):
    N, K = SHAPES[shape]
    for M, sms in itertools.product(range(1, GEMV_MAX_ROWS + 1), (16, 78, 132)):
        config = default_gemv_config(M, N, K, sms)
        for group in (32, 128, K):
            assert gemv_config_fault(config, M=M, N=N, K=K, group=group) is None
        assert config.fits(M, N, K, sms)


@pytest.mark.parametrize(
    "change",
    [{"block_m": 8}, {"block_n": 8}, {"warps": 3}, {"steps_in_flight": 3}, {"warps": 1}],
    ids=str,
)
def test_fault_names_what_a_config_lacks(change):
    problem = {"M": 9, "N": 4096, "K": 14336, "group": 128}
    fits = W4A8GemvConfig(block_m=16)
    assert gemv_config_fault(fits, **problem) is None
    assert gemv_config_fault(dataclasses.replace(fits, **change), **problem) is not None
    assert "float8" in gemv_config_fault(fits, **problem, integers=False)


@pytest.fixture
def plan(monkeypatch):
    """Make plans as on an H200."""
    table = TuningTable(gpu="cpu")
    monkeypatch.setattr(sm90, "sm_count", lambda device: 132)
    monkeypatch.setattr(sm90, "tuning_table_of", lambda device: table)

    def plan(name, M, kernel=None, multiples=True):
        packed = exact_case(name, 1, 4096, 1024, CPU, multiples)[2]
        weight = sm90.prepare_weight(packed, torch.bfloat16)
        weight = dataclasses.replace(weight, activation=packed.activation, requested=kernel)
        return sm90.plan(weight.problem, M)

    plan.table = table
    return plan


@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32", "w4a8-channel"])
def test_few_rows_of_int8_run_in_the_gemv(name, plan):
    for M in range(1, 20):
        found = plan(name, M)
        few = M <= GEMV_DEFAULT_ROWS
        assert (found.variant == GEMV) == isinstance(found.config, W4A8GemvConfig) == few
        assert plan("w4a8-fp8", M).variant == "sm90"
        assert plan(name, M, "fixed_order").variant != GEMV


def test_choice_of_variant_is_obeyed(plan):
    for kernel in ("sm90", f"-{GEMV}"):
        assert plan("w4a8", 1, kernel).variant == "sm90_multiples"
        assert plan("w4a8", 1, kernel, multiples=False).variant == "sm90"
    for M, variant in ((1, GEMV), (16, GEMV), (17, "sm90_multiples")):
        assert plan("w4a8", M, GEMV).variant == variant
    assert plan("w4a8", 1, "sm90_w4a8").variant == GEMV
    assert plan("w4a8-fp8", 1, GEMV).variant == "sm90"


def test_measured_config_is_used(plan):
    problem = {"M": 16, "N": 4096, "K": 1024, "group": 1024, "integers": True}
    measured = W4A8GemvConfig(block_m=16, block_n=64, steps_in_flight=1)
    row = TuningRow(
        op=TUNED, problem=problem, config=measured, microseconds=1.0, default_microseconds=None
    )
    plan.table.add_(row)
    for M in (9, 16):
        assert plan("w4a8", M).config == measured
        assert plan("w4a8", M, "sm90").variant == "sm90_multiples"
    assert plan("w4a8", 8).config != measured, "of another bucket"
    assert plan("w4a8", 16, multiples=False).variant == "sm90", "of another key"
