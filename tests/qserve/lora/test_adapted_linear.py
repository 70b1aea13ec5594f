"""A layer with adapters: the inputs its plan needs, and which kernel adds the adapters."""

from dataclasses import replace

import pytest
import torch

from formats.in_memory.packed import PackedWeight
from formats.scheme import QuantSpec
from qkernels import ops, reference
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.limbs_reference import from_limbs, to_limbs
from qkernels.quant_linear import QuantLinear
from qserve.model.blocks.linear import AdaptedLinear, AdaptedRows, FloatLinear
from tests.qkernels.lora_case import adapted, lora_weights

K, SIZES = 256, (96, 32)
SLOTS = [1, -1, 0]
FORM = LimbForm(bits=4)


@pytest.fixture
def layer():
    """W4A16 weights, with one adapter of rank 3 and one of rank 5."""
    weight_NK = torch.randn(sum(SIZES), K, generator=torch.Generator().manual_seed(1)) / 16
    spec = QuantSpec(bits=4, symmetric=True, group_size=128)
    base = QuantLinear.for_inference(
        PackedWeight.from_float(weight_NK, spec), None, torch.float32, "cpu", "reference"
    )
    lora = lora_weights([[3, 2], [5, 0]], K, SIZES, torch.float32, "cpu", max_rank=5)
    return AdaptedLinear(base, lora, AdaptedRows())


@pytest.fixture
def adding_product(monkeypatch, layer):
    """Replaces a kernel that takes limbs and adds adapters. Returns its arguments."""
    plan_linear, linear, handed = ops.plan_linear, ops.linear, []

    def plan(weight, M, consumer=None, *, fused=True, adapted=None):
        made = replace(plan_linear(weight, M, consumer), operand=FORM, input=FORM)
        if adapted is None:
            return made
        with_tensor = replace(FORM, with_tensor=True)
        return replace(made, input=with_tensor, adds_adapters=adapted == SIZES)

    def run(x, weight, bias=None, plan=None, term=None, out=None):
        assert out is None
        if isinstance(x, torch.Tensor):
            return linear(x, weight, bias)
        handed.append((x, plan, term))
        y = linear(from_limbs(x).float(), weight, bias)
        if term is not None:
            rank = term.weights.max_rank
            reference.lora_expand_(y, term.h_PTSR.sum(0)[..., :rank], term.slots_T, term.weights)
        return y

    monkeypatch.setattr(ops, "plan_linear", plan)
    monkeypatch.setattr(ops, "linear", run)
    return handed


def expected(layer, x):
    return adapted(x, layer.base(x).double(), SLOTS, layer.weights)


def test_adapter_added_by_separate_kernel(layer):
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2))
    layer.rows.slots_T = torch.tensor(SLOTS, dtype=torch.int32)
    plan = layer.plan(3)
    assert plan.input is None and not plan.adds_adapters
    torch.testing.assert_close(layer(x, plan).double(), expected(layer, x), atol=1e-4, rtol=1e-4)


def test_adapter_added_by_product_kernel(layer, adding_product, monkeypatch):
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(3)).half().float()
    want = expected(layer, x)
    layer.rows.slots_T = torch.tensor(SLOTS, dtype=torch.int32)
    monkeypatch.setattr(ops, "lora_expand_", None)  # is not called
    plan = layer.plan(3)
    assert plan.adds_adapters and plan.input == replace(FORM, with_tensor=True)
    y = layer(to_limbs(x, plan.input), plan)
    ((taken, given, term),) = adding_product
    assert isinstance(taken, Limbs) and given is plan.base and term.weights is layer.weights
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-4)


def test_plan_without_adapters_equals_base(layer, adding_product):
    layer.rows.slots_T = None
    plan = layer.plan(3)
    assert plan == layer.base.plan(3) and plan.input == FORM and not plan.adds_adapters


def test_float_layer_with_adapter_reads_tensor(layer):
    weight = torch.randn(sum(SIZES), K)
    dense = AdaptedLinear(FloatLinear(weight), layer.weights, layer.rows)
    layer.rows.slots_T = torch.tensor(SLOTS, dtype=torch.int32)
    x, plan = torch.randn(3, K), dense.plan(3)
    assert plan.input is None and not plan.adds_adapters
    want = adapted(x, (x @ weight.T).double(), SLOTS, layer.weights)
    torch.testing.assert_close(dense(x, plan).double(), want, atol=1e-4, rtol=1e-4)


def test_fixed_order_plan_is_equal_without_adapters(layer, adding_product):
    """Input rounded by the operation before has other bits, so no step may have it."""
    layer = AdaptedLinear(layer.base, layer.weights, layer.rows, fixed_order=True)
    layer.rows.slots_T = torch.tensor(SLOTS, dtype=torch.int32)
    plan = layer.plan(3)
    layer.rows.slots_T = None
    assert layer.plan(3) == plan != layer.base.plan(3)
    x = torch.randn(3, K)
    assert torch.equal(layer(x, plan), layer.base(x))
