"""Experts with adapters: plans, warm-up, checks of arguments, and the reference on a CPU."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.gpu.config import power_of_two
from qkernels.moe.adapted.config import MOST_PAIRS, pair_tiles
from qkernels.moe.adapted.weights import ExpertAdapters
from qkernels.moe.config import sort_chunk, tiles_of_pairs
from qkernels.moe.experts import ExpertsProblem
from qkernels.moe.routing import SILU, Routes
from qkernels.moe.variants import adapted_plan, layer_of
from qkernels.warm_up import adapted_expert_boundaries
from tests.qkernels.moe_case import expert_lora, make_experts

PROBLEM = ExpertsProblem(
    kernel="triton",
    kind="float",
    spec=None,
    activation=None,
    num_experts=128,
    routed_experts=128,
    top_k=8,
    hidden=2048,
    inner=768,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
)


@pytest.mark.parametrize("M", [1, 3, 16, 32, 33, 500, 8192])
@pytest.mark.parametrize("num_slots", [1, 4, 100])
def test_tiles_hold_the_pairs_of_an_expert(M, num_slots):
    """Without sorting, one tile takes all pairs of an expert; an adapter always has a block."""
    plan = adapted_plan(layer_of(PROBLEM), M)
    tiles = pair_tiles(plan, num_slots)
    assert plan.output == "sum" and plan.down.split == 1
    assert tiles.block_m <= MOST_PAIRS
    assert tiles.block_m >= M or plan.variant == "sorted"
    assert tiles.owners == (tiles.block_m if tiles.by_row else num_slots)
    pairs = M * PROBLEM.top_k
    most = tiles_of_pairs(pairs, PROBLEM.num_experts, tiles.block_m)
    assert most * tiles.block_m >= pairs


def test_warm_up_covers_every_kernel():
    def kernel(M):
        plan, pairs = adapted_plan(layer_of(PROBLEM), M), M * PROBLEM.top_k
        return plan, sort_chunk(pairs) if plan.variant == "sorted" else power_of_two(pairs)

    rows = adapted_expert_boundaries([PROBLEM, PROBLEM], 4096)
    assert {kernel(M) for M in rows} == {kernel(M) for M in range(1, 4097)}
    assert adapted_expert_boundaries([replace(PROBLEM, kernel="reference")], 4096) == []


@pytest.fixture
def case():
    """Experts and arguments of `ops.experts` on a CPU."""
    weights = make_experts(None, 64, 32, 3, 2, SILU, False, torch.float32)
    prepared = ops.prepare_experts(weights, torch.float32, "cpu")
    adapters = ExpertAdapters(
        gate_up=expert_lora([(2, 3)], 3, 64, (32, 32), torch.float32, "cpu", max_rank=3),
        down=expert_lora([(2,)], 3, 32, (64,), torch.float32, "cpu", max_rank=3),
        slots_M=torch.tensor([0, -1], dtype=torch.int32),
    )
    routes = Routes(torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), torch.full((2, 2), 0.5))
    return torch.randn(2, 64), routes, prepared, adapters


def test_rows_without_adapter_equal_plain_rows(case):
    x, routes, prepared, adapters = case
    got, plain = ops.experts(*case[:3], adapters=adapters), ops.experts(x, routes, prepared)
    torch.testing.assert_close(got[1], plain[1])
    assert (got[0] - plain[0]).norm() > 0.1 * plain[0].norm()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda a: replace(a, slots_M=a.slots_M[:1]), "adapters slots"),
        (lambda a: replace(a, slots_M=a.slots_M.long()), "adapters slots"),
        (lambda a: replace(a, down=a.gate_up), "adapters down A"),
        (
            lambda a: replace(a, gate_up=replace(a.gate_up, b_LREN=a.gate_up.b_LREN[..., 1:])),
            "adapters gate_up B",
        ),
        (
            lambda a: replace(a, down=replace(a.down, a_LRESK=a.down.a_LRESK[:, :, 1:])),
            "adapters down A",
        ),
    ],
)
def test_wrong_adapters_are_refused(case, change, error):
    x, routes, prepared, adapters = case
    with pytest.raises(KernelError, match=error):
        ops.experts(x, routes, prepared, adapters=change(adapters))
