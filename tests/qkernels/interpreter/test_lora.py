"""Adapters: the kernels against plain float64, interpreted on a CPU, compiled on a GPU."""

import dataclasses

import pytest
import torch

from qkernels import ops
from qkernels.lora import triton_lora
from qkernels.lora.config import fixed_expand_config, fixed_shrink_config
from qkernels.operands.split_k import SplitKPartials
from tests.qkernels.lora_case import adapted, lora_weights

# rows' slots; where there are more slots than rows, each row looks for its adapter's first
CASES = {
    "one row": ([0], [[8]], 300, [63]),
    "none": ([-1, -1, -1], [[8], [3]], 64, [40]),
    "mixed": (
        [1, -1, 0, 1, 2, 2, 0, -1, 1],
        [[16, 5, 1], [0, 7, 0], [16, 0, 16]],
        513,
        [96, 33, 33],
    ),
    "four linears": (
        [2, 0, -1, 1, 0],
        [[4, 0, 16, 3], [0, 5, 0, 9], [1, 2, 3, 4]],
        130,
        [70, 33, 64, 81],
    ),
    "rank beyond a block": ([0, 1, 1], [[33, 16], [17, 40]], 260, [70, 70]),
    "more slots than rows": ([4, 3, 4, -1, 1], [[2]] * 6, 96, [48]),
    "one row of many slots": ([5], [[3]] * 6, 64, [20]),
    "more slots than rows of a tile": ([19, 3, 19, -1, 7, 3] * 3, [[2]] * 20, 96, [48]),
    "two tiles": ([0, 1, -1] * 6, [[4], [9]], 128, [64]),
    "tiles of 64 rows": ([0, 1, -1] * 30, [[4], [9]], 700, [64]),
    "prompts": ([1] * 70 + [-1] * 5 + [0] * 60, [[12], [3]], 200, [129]),
}


@pytest.mark.parametrize("name", CASES)
def test_adapters_of_rows(device, half, poison, assert_close, name):
    slots, ranks, K, sizes = CASES[name]
    weights = lora_weights(ranks, K, sizes, half, device, max_rank=max(map(max, ranks)) + 3)
    generator = torch.Generator().manual_seed(len(name))
    T, N = len(slots), sum(sizes)
    x = torch.randn(T, K, generator=generator).to(device, half)
    y = torch.randn(T, N, generator=generator).to(device, half)
    want, got = adapted(x, y, slots, weights), y.clone()
    slots_T = torch.tensor(slots, dtype=torch.int32, device=device)
    h = ops.lora_shrink(x, slots_T, weights, kernel="triton")
    ops.lora_expand_(got, h, slots_T, weights, kernel="triton")
    assert_close("y", want, got, 4e-3 if half == torch.float16 else 2e-2)
    untouched = [t for t, slot in enumerate(slots) if slot < 0]
    assert torch.equal(got[untouched], y[untouched])


def test_split_k_partial_sums_with_adapters(device, half, poison, assert_close):
    """The first part takes what adapters add; the sum is the next operation's."""
    slots = [0, -1, 1]
    weights = lora_weights([[4, 2], [1, 16]], 128, [30, 18], half, device, max_rank=16)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(device, half)
    parts = torch.randn(3, 3, 48, generator=torch.Generator().manual_seed(2)).to(device)
    want = adapted(x, parts.sum(0), slots, weights)
    y = SplitKPartials(parts=parts.clone(), dtype=half)
    slots_T = torch.tensor(slots, dtype=torch.int32, device=device)
    h = ops.lora_shrink(x, slots_T, weights, kernel="triton")
    ops.lora_expand_(y, h, slots_T, weights, kernel="triton")
    assert torch.equal(y.parts[1:], parts[1:])
    assert_close("sum", want, y.parts.sum(0), 2e-3)


@pytest.mark.parametrize("T", [1, 5, 16, 20, 40])
def test_partial_sums_of_h_added_by_product(device, half, poison, assert_close, T):
    """Up to 32 rows they are left; beyond its rank a row's h is zero up to the end of a block."""
    ranks, K, sizes = [[20, 3], [0, 16]], 1100, [64, 64]
    weights = lora_weights(ranks, K, sizes, half, device, max_rank=21)
    slots = [(3 * t + 1) % 3 - 1 for t in range(T)]
    x = torch.randn(T, K, generator=torch.Generator().manual_seed(T)).to(device, half)
    slots_T = torch.tensor(slots, dtype=torch.int32, device=device)
    term = ops.lora_term(x, slots_T, weights, kernel="triton")
    assert term.h_PTSR.shape[1:] == (T, 2, 32) and (term.h_PTSR.shape[0] > 1) == (T <= 32)
    h_TSR = term.h_PTSR.double().sum(0)
    for t, slot in enumerate(slots):
        for s, rank in enumerate(ranks[slot] if slot >= 0 else ()):
            want = weights.a_LRSK[slot, :rank, s].double() @ x[t].double()
            blocks = -(-rank // 16) * 16
            if rank:
                assert_close("h", want, h_TSR[t, s, :rank], 1e-5)
            assert not h_TSR[t, s, rank:blocks].any()


def test_kernels_equal_float32_reference(device, poison, assert_close):
    """In float32, where nothing is rounded between the two products."""
    slots, ranks, K, sizes = CASES["mixed"]
    weights = lora_weights(ranks, K, sizes, torch.float32, device, max_rank=20)
    x = torch.randn(len(slots), K, generator=torch.Generator().manual_seed(3)).to(device)
    slots_T = torch.tensor(slots, dtype=torch.int32, device=device)
    want = adapted(x, torch.zeros(len(slots), sum(sizes), device=device), slots, weights)
    for kernel in ("reference", "triton"):
        y = torch.zeros(len(slots), sum(sizes), device=device)
        h = ops.lora_shrink(x, slots_T, weights, kernel=kernel)
        ops.lora_expand_(y, h, slots_T, weights, kernel=kernel)
        assert_close(kernel, want, y, 1e-5)


def fixed(x, slots, weights, y, *, adds_parts=None):
    """y with the adapters added in fixed order."""
    T, N = y.shape
    slots_T = torch.tensor(slots, dtype=torch.int32, device=x.device)
    sizes = weights.num_slices, weights.max_rank, weights.num_slots
    config = fixed_shrink_config(T, x.shape[1], *sizes)
    if adds_parts is not None:
        config = dataclasses.replace(config, adds_parts=adds_parts)
    h = triton_lora.lora_shrink(x, slots_T, weights, config)
    out, config = y.clone(), fixed_expand_config(T, N, weights.num_slots)
    triton_lora.lora_expand_(out, h, slots_T, weights, config)
    return out


@pytest.mark.parametrize("num_slots", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_fixed_order_rows_are_independent(device, half, poison, assert_close, num_slots):
    """A row alone, among rows of other adapters, in another slot, with parts added after: one."""
    ranks, K, sizes, T = [[20, 3], [5, 16], [0, 7]], 1300, [40, 30], 40
    weights = lora_weights(
        [*ranks, *[[1, 1]] * (num_slots - 3)], K, sizes, half, device, max_rank=21
    )
    generator = torch.Generator().manual_seed(num_slots)
    x = torch.randn(T, K, generator=generator).to(device, half)
    y = torch.randn(T, sum(sizes), generator=generator).to(device, half)
    slots = [(3 * t + t // 16) % 4 - 1 for t in range(T)]
    want = fixed(x, slots, weights, y)
    assert_close("y", adapted(x, y, slots, weights), want, 4e-3 if half == torch.float16 else 2e-2)
    assert torch.equal(fixed(x, slots, weights, y, adds_parts=False), want)
    # at the same place of a tile: the interpreter's products differ by it, a GPU's do not
    for first, count in ((0, 1), (32, 1), (16, 16), (16, 24)):
        rows = slice(first, first + count)
        alone = fixed(x[rows], slots[rows], weights, y[rows])
        assert torch.equal(alone, want[rows]), (first, count)
