"""W4A16 and W8A16 products that add adapters themselves, against float64, on an sm_90 GPU."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.linear.plan import GemmPlan
from qkernels.lora.term import LoraTerm
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import SplitKPartials, reduced
from qkernels.wna16.sm90_small_m_config import SmallMConfig
from tests.qkernels.gpu.products import random_x
from tests.qkernels.lora_case import adapted, lora_weights

gemm = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)
pytestmark = pytest.mark.hopper

K = 768
SIZES = {"qkv": (192, 64, 128), "gate_up": (320, 320), "o": (448,)}
RANKS = {  # of each slot, for each linear
    "one block": [[8, 16, 3], [16, 16, 16], [1, 0, 9], [12, 5, 16]],
    "some blocks": [[33, 64, 17], [0, 16, 48], [64, 64, 64], [16, 32, 5]],
}
MIXES = {
    "one adapter": lambda M: [1] * M,
    "each its own": lambda M: [m % 4 for m in range(M)],
    "some without": lambda M: [(m * 7 + 2) % 5 - 1 for m in range(M)],
    "the last alone": lambda M: [-1] * (M - 1) + [3],
}


def slots_of(slots: list[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32, device="cuda")


def adapters(ranks: str, sizes: tuple[int, ...], dtype: torch.dtype, in_features: int = K):
    own = [of_slot[: len(sizes)] for of_slot in RANKS[ranks]]
    most = 19 if ranks == "one block" else 64
    return lora_weights(own, in_features, sizes, dtype, "cuda", max_rank=most)


def product(x, weight, plan: GemmPlan, slots_T, lora, bias=None):
    """Compute as a layer does: make the input, then shrink, then the product."""
    taken = ops.to_limbs(x, plan.input) if isinstance(plan.input, LimbForm) else x
    if isinstance(taken, Limbs):
        assert taken.tensor is not None
    term = ops.lora_term(x, slots_T, lora)
    return ops.linear(taken, weight, bias, plan, term)


def check(packed, lora, x, slots, assert_close, plan=None, bias=None):
    """One product, whole and by element, twice."""
    weight = ops.prepare_weight(packed, x.dtype)
    plan = plan or ops.plan_linear(weight, x.shape[0], adapted=lora.sizes)
    assert plan.adds_adapters
    slots_T = slots_of(slots)
    y = product(x, weight, plan, slots_T, lora, bias)
    got = reduced(y)
    weight_NK = packed.dequantize(torch.float64)
    base = x.double() @ weight_NK.t() + (0 if bias is None else bias.double())
    want = adapted(x, base, slots, lora)
    assert_close(plan.variant, want, got, 4e-3)
    # in addition to the products' own errors, h is rounded to the dtype
    eps = torch.finfo(x.dtype).eps
    sizes_of_terms = adapted(x.abs(), torch.zeros_like(base), slots, magnitudes(lora))
    bound = (
        eps * want.abs() + eps * sizes_of_terms + 2**-20 * (x.double().abs() @ weight_NK.abs().t())
    )
    assert ((got.double() - want).abs() <= bound).all(), "an element is off"
    again = reduced(product(x, weight, plan, slots_T, lora, bias))
    assert torch.equal(got, again), "equal inputs, equal bits"
    return y


def magnitudes(lora):
    return replace(lora, a_LRSK=lora.a_LRSK.abs(), b_LRN=lora.b_LRN.abs())


def split_plan(weight, split: int, rows: int, output: str = "sum", blocks: int = 2) -> GemmPlan:
    tile = SmallMConfig(block_m=rows, split=split, stages=3, blocks_per_sm=blocks)
    return replace(gemm.plan_for(tile, weight.problem, output=output), adds_adapters=True)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64])
def test_every_number_of_rows(make_weight, poison, assert_close, M, ranks):
    for name, sizes in SIZES.items():
        lora = adapters(ranks, sizes, torch.bfloat16)
        packed = make_weight(sum(sizes), K, 128, symmetric=name != "o")
        for mix in MIXES.values():
            check(packed, lora, random_x(M, K, torch.bfloat16), mix(M), assert_close)


@pytest.mark.parametrize("M", [2, 4])
def test_adapters_with_8_bit_codes(make_weight, poison, assert_close, M):
    lora = adapters("some blocks", SIZES["qkv"], torch.float16)
    packed = make_weight(sum(SIZES["qkv"]), K, 128, bits=8)
    check(packed, lora, random_x(M, K, torch.float16), [2, 0, -1, 1][:M], assert_close)


@pytest.mark.parametrize("output", ["sum", "split_k"])
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_splits_and_bias(make_weight, poison, assert_close, rows, output):
    """One split has what adapters add, whether the product reduces the splits or not."""
    M, sizes = rows - 1, SIZES["qkv"]
    lora = adapters("some blocks", sizes, torch.bfloat16)
    packed = make_weight(sum(sizes), K, 128, symmetric=False)
    weight = ops.prepare_weight(packed, torch.bfloat16)
    bias = torch.randn(sum(sizes), device="cuda").bfloat16()
    x, slots = random_x(M, K, torch.bfloat16), MIXES["some without"](M)
    for blocks in (1, 2):
        plan = split_plan(weight, 3, rows, output, blocks)
        y = check(packed, lora, x, slots, assert_close, plan, bias)
        if output == "split_k":
            assert isinstance(y, SplitKPartials) and y.parts.shape[0] == 3
            one = reduced(
                product(x, weight, split_plan(weight, 3, rows), slots_of(slots), lora, bias)
            )
            assert torch.equal(one, y.total())


@pytest.mark.parametrize("M", [6, 40])
def test_more_tiles_than_blocks(make_weight, assert_close, M):
    """Blocks that go on to a next tile, of another linear; the last tile has one of two stored."""
    sizes = (64 * 333, 64 * 300)
    lora = adapters("one block", sizes, torch.bfloat16, 384)
    packed = make_weight(sum(sizes), 384, 128)
    check(packed, lora, random_x(M, 384, torch.bfloat16), MIXES["some without"](M), assert_close)


@pytest.mark.parametrize("M", [1, 4, 7, 16])
def test_adapters_with_many_partial_sums_of_h(make_weight, poison, assert_close, M):
    """As many inputs as the longest linear of an 8B model has."""
    lora = adapters("one block", (448,), torch.bfloat16, 14336)
    packed = make_weight(448, 14336, 128)
    x, slots = random_x(M, 14336, torch.bfloat16), MIXES["some without"](M)
    assert ops.lora_term(x, slots_of(slots), lora).h_PTSR.shape[0] > 8
    check(packed, lora, x, slots, assert_close)


@pytest.mark.parametrize("M", [2, 4, 8, 30])
def test_rows_without_adapter_equal_plain_product_bitwise(make_weight, poison, M):
    sizes = SIZES["gate_up"]
    lora = adapters("one block", sizes, torch.bfloat16)
    weight = ops.prepare_weight(make_weight(sum(sizes), K, 128), torch.bfloat16)
    x = random_x(M, K, torch.bfloat16)
    plan = ops.plan_linear(weight, M, adapted=sizes)
    plain = replace(plan, adds_adapters=False)
    want = ops.linear(ops.to_limbs(x, plan.input) if plan.input else x, weight, None, plain)
    assert torch.equal(product(x, weight, plan, slots_of([-1] * M), lora), want)
    slots = [1, *[-1] * (M - 1)]
    got = product(x, weight, plan, slots_of(slots), lora)
    assert torch.equal(got[1:], want[1:]) and not torch.equal(got[0], want[0])


@pytest.mark.parametrize("M", [3, 12])
def test_nan_and_inf_stay_in_rows_of_their_adapter(make_weight, poison, M):
    sizes = SIZES["qkv"]
    lora = adapters("one block", sizes, torch.bfloat16)
    weight = ops.prepare_weight(make_weight(sum(sizes), K, 128), torch.bfloat16)
    x, slots = random_x(M, K, torch.bfloat16), MIXES["each its own"](M)
    plan = ops.plan_linear(weight, M, adapted=sizes)
    want = product(x, weight, plan, slots_of(slots), lora)
    lora.b_LRN[1, 0] = float("inf")
    lora.a_LRSK[2, 0] = float("nan")
    got = product(x, weight, plan, slots_of(slots), lora)
    for m, slot in enumerate(slots):
        if slot in (1, 2):
            assert not got[m].isfinite().any() or slot == 2
            assert not got[m].isfinite().all()
        else:
            assert torch.equal(got[m], want[m])


@pytest.mark.parametrize("M", [1, 8])
def test_captured_graph_serves_any_adapters(make_weight, assert_close, M):
    """Slots, inputs and adapters are read on the device."""
    sizes = SIZES["qkv"]
    lora = adapters("one block", sizes, torch.bfloat16)
    packed = make_weight(sum(sizes), K, 128)
    weight = ops.prepare_weight(packed, torch.bfloat16)
    plan = ops.plan_linear(weight, M, adapted=sizes)
    x, slots_T = random_x(M, K, torch.bfloat16), slots_of([0] * M)
    product(x, weight, plan, slots_T, lora)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(x, weight, plan, slots_T, lora)
    for mix in MIXES.values():
        x.normal_()
        slots_T.copy_(slots_of(mix(M)))
        graph.replay()
        want = product(x, weight, plan, slots_T.clone(), lora)
        assert torch.equal(y, want)
        base = x.double() @ packed.dequantize(torch.float64).t()
        assert_close("graph", adapted(x, base, mix(M), lora), y, 4e-3)


def test_unused_adapter_term_is_refused(make_weight):
    lora = adapters("one block", SIZES["o"], torch.bfloat16)
    weight = ops.prepare_weight(make_weight(448, K, 128), torch.bfloat16)
    x = random_x(8, K, torch.bfloat16)
    term = ops.lora_term(x, slots_of([0] * 8), lora)
    with pytest.raises(KernelError, match="expected a plan whose kernel adds adapters"):
        ops.linear(x, weight, None, ops.plan_linear(weight, 8), term)
    few = LoraTerm(h_PTSR=term.h_PTSR[:, :5], slots_T=term.slots_T, weights=lora)
    with pytest.raises(KernelError, match="term h"):
        ops.linear(x, weight, None, ops.plan_linear(weight, 8, adapted=(448,)), few)
