"""Mixtures of experts: the kernels against plain torch, interpreted on a CPU, compiled on a GPU."""

import dataclasses

import pytest
import torch

from formats.scheme import Scheme
from qkernels import ops, reference
from qkernels.moe.config import ExpertsConfig, ExpertsPlan
from qkernels.moe.routing import GEGLU, RELU2, SILU, Glu, Routes, Routing
from qkernels.operands.split_k import reduced
from tests.qkernels.moe_case import COARSER, make_experts, run

ROUTINGS = {
    "mixtral": Routing(num_experts=8, top_k=2, normalized=True),
    "qwen2-moe": Routing(num_experts=60, top_k=4, rounded=True),
    "kolibri": Routing(num_experts=24, top_k=3, scores="sigmoid_of_chosen", normalized=True),
    "gpt-oss": Routing(num_experts=32, top_k=4, scores="softmax_of_chosen", rounded=True),
    "deepseek-v2": Routing(
        num_experts=20, top_k=3, num_groups=5, top_groups=2, factor=16.0, group_score="max"
    ),
    "glm": Routing(
        num_experts=24,
        top_k=5,
        scores="sigmoid",
        normalized=True,
        num_groups=3,
        top_groups=2,
        group_score="top2",
        factor=2.5,
    ),
    "phi": Routing(num_experts=16, top_k=2, scores="sparsemixer", jitter=0.13, rounded=True),
    "deepseek-v4": Routing(
        num_experts=12, top_k=3, scores="sqrtsoftplus", normalized=True, factor=1.5
    ),
    "all": Routing(num_experts=5, top_k=5),
}
CLAMPED = Glu(alpha=1.702, offset=1.0, limit=0.7)
CUT_AFTER = Glu(limit=0.2, cut_after=True)


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(device, half, poison, assert_close, name, ties):
    routing = ROUTINGS[name]
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(7, routing.num_experts, generator=generator) * 3
    if ties:  # equal scores everywhere: the lowest experts are chosen
        logits = logits.round() / 4
    logits = logits.to(device, half)
    correction = None
    if name in ("glm", "deepseek-v4", "kolibri"):
        correction = torch.randn(routing.num_experts, generator=generator).to(device)
    got = ops.route(logits, routing, correction) if device.type == "cuda" else None
    if got is None:
        from qkernels.moe.triton_route import route

        got = route(logits, routing, correction)
    want = reference.route(logits, routing, correction)
    assert torch.equal(got.ids_Mk, want.ids_Mk)
    assert_close(
        "shares", want.weights_Mk, got.weights_Mk, 1e-3 * COARSER[half] if routing.rounded else 1e-5
    )


def test_scores_of_small_and_large_logits(device):
    """1 + exp(x) rounds small exponentials off, and overflows for large ones."""
    from qkernels.moe.triton_route import route

    logits = torch.tensor([[-40.0, -17.0, -9.0, -3.6, -3.4, 0.0, 2.0, 19.5, 20.5, 120.0]])
    routing = Routing(num_experts=10, top_k=10, scores="sqrtsoftplus")
    got = route(logits.to(device), routing)
    want = torch.log1p(logits.double().exp()).sqrt().flip(1)
    assert got.ids_Mk.tolist() == [list(range(9, -1, -1))]
    torch.testing.assert_close(got.weights_Mk.cpu().double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "M", "C"), [("glm", 3, 96), ("gpt-oss", 1, 1100), ("qwen2-moe", 5, 64)]
)
def test_route_tokens(device, half, poison, assert_close, name, M, C):
    """The router's product and the choice in one kernel; many tokens use torch's product."""
    from qkernels.gpu.workspace import workspace
    from qkernels.moe.triton_route import route_tokens

    routing = ROUTINGS[name]
    generator = torch.Generator().manual_seed(C)
    dtype = torch.float32 if name == "glm" else half
    E = routing.num_experts

    def numbers(*shape):  # few bits, so that every order of summation gives the same logits
        return torch.randint(-3, 4, shape, generator=generator) / 8

    x, weight = numbers(M, C).to(device, half), numbers(E, C).to(device, dtype)
    bias = numbers(E).to(device, dtype) if name == "gpt-oss" else None
    correction = torch.randn(E, generator=generator).to(device) if name == "glm" else None
    got = route_tokens(x, weight, routing, bias, correction)
    want = reference.route_tokens(x, weight, routing, bias, correction)
    assert torch.equal(got.ids_Mk, want.ids_Mk)
    assert_close("shares", want.weights_Mk, got.weights_Mk, 2e-3 * COARSER[half])
    assert not workspace(device)[1].any(), "counters are left at zero"


def test_nan_logits_route_to_valid_experts(device, half):
    """Whatever the logits are, the products must not read beyond their weights."""
    from qkernels.moe.triton_route import route, route_tokens

    routing = ROUTINGS["glm"]
    logits = torch.full((2, routing.num_experts), float("nan"), dtype=half, device=device)
    x = torch.full((2, 64), float("nan"), dtype=half, device=device)
    weight = torch.ones(routing.num_experts, 64, dtype=half, device=device)
    for routes in (route(logits, routing), route_tokens(x, weight, routing)):
        ids = routes.ids_Mk
        assert ((ids >= 0) & (ids < routing.num_experts)).all()
        assert all(len(set(row)) == routing.top_k for row in ids.tolist())


@pytest.mark.parametrize("name", ["all", "deepseek-v2", "mixtral", "many"])
def test_rank_based_top_k_equals_sequential_top_k(device, half, name):
    """Ties everywhere. 130 experts are too many to be ranked: they are chosen one by one."""
    from qkernels.moe.triton_route import route_tokens

    routing = ROUTINGS.get(name) or Routing(num_experts=130, top_k=3, normalized=True)
    E = routing.num_experts
    generator = torch.Generator().manual_seed(E)
    weight = (torch.randint(-2, 3, (E, 32), generator=generator) / 4).to(device, half)
    x = torch.zeros(3, 32)
    x[0, 0], x[1, 1], x[2, :2] = 1, -1, 0.5
    x = x.to(device, half)
    got, want = (module(x, weight, routing) for module in (route_tokens, reference.route_tokens))
    assert torch.equal(got.ids_Mk, want.ids_Mk)


@pytest.mark.parametrize(("M", "k", "E"), [(1, 3, 9), (2, 1, 1), (5, 2, 3), (7, 3, 40), (17, 2, 5)])
def test_active_experts_are_listed_once(device, M, k, E):
    from qkernels.moe.triton_active import active_experts

    generator = torch.Generator().manual_seed(M)
    ids = torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(M)])
    active = active_experts(ids.to(device, torch.int32), E)
    found = active.list.tolist()
    assert len(ids.unique()) <= active.most == min(E, M * k)
    if M == 1:
        assert found == ids[0].tolist(), "one token's experts as they are, without their number"
    else:
        assert found[: 1 + found[0]] == [len(ids.unique()), *ids.unique().tolist()]


@pytest.mark.parametrize(("M", "k", "E"), [(2, 1, 1), (11, 2, 3), (7, 3, 40)])
def test_sorted_entries_hold_pairs_of_one_expert(device, half, M, k, E):
    """No entry exceeds its columns, each pair is in one entry, and each has its token's row."""
    from qkernels.moe.triton_active import active_pairs

    generator = torch.Generator().manual_seed(M)
    ids = torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(M)])
    x = torch.randn(M, 1030, generator=generator).to(device, half)
    routes = Routes(ids.to(device, torch.int32), torch.rand(M, k, generator=generator).to(device))
    active = active_pairs(x, routes, E, 8)
    order = active.order.cpu().long()
    assert torch.equal(order, ids.flatten().sort(dim=0, stable=True).indices)
    assert torch.equal(active.x_PC, x[active.order.long() // k])
    assert torch.equal(active.weights, routes.weights_Mk.flatten()[active.order.long()])
    count = int(active.list[0])
    entries = active.list[1:].view(3, active.most)[:, :count].t().tolist()
    covered = []
    for expert, first, pairs in entries:
        assert 0 < pairs <= 8
        covered += range(first, first + pairs)
        assert set(ids.flatten()[order[first : first + pairs]].tolist()) == {expert}
    assert covered == list(range(M * k)) and count <= active.most


def choices_of_rank(M, k, E, here, device):
    """Random choices of E experts, of which the first `here` are on this rank: int32 [M, k]."""
    generator = torch.Generator().manual_seed(M)
    ids = torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(M)])
    return ids.clamp(max=here).to(device, torch.int32)


@pytest.mark.parametrize(("M", "k", "E", "here"), [(1, 3, 40, 1), (1, 2, 5, 4), (7, 3, 40, 20)])
def test_experts_of_other_ranks_are_not_active(device, M, k, E, here):
    """Their parts are cleared, those of the others are left alone."""
    from qkernels.moe.triton_active import active_experts

    ids, split = choices_of_rank(M, k, E, here, device), 2
    parts = torch.full((split * k, M, 1030), 7.0, device=device)
    active = active_experts(ids, here, True, parts)
    found = [e for e in ids.unique().tolist() if e < here]
    assert active.counted and active.list[: 1 + len(found)].tolist() == [len(found), *found]
    for row in range(split):
        zeros = (parts[row * k : (row + 1) * k] == 0).all(-1).t()
        assert torch.equal(zeros, ids == here)
        assert ((parts[row * k : (row + 1) * k] == 7).all(-1).t() == (ids < here)).all()


@pytest.mark.parametrize(("M", "k", "E", "here"), [(11, 2, 3, 1), (7, 3, 40, 33)])
def test_pairs_of_other_ranks_experts_are_skipped(device, half, M, k, E, here):
    from qkernels.moe.triton_active import active_pairs

    ids = choices_of_rank(M, k, E, here, device)
    x = torch.randn(M, 70).to(device, half)
    parts = torch.full((k, M, 70), 7.0, device=device)
    active = active_pairs(x, Routes(ids, torch.rand(M, k).to(device)), here, 8, parts)
    inside = int((ids < here).sum())
    order = ids.flatten().cpu().sort(dim=0, stable=True).indices[:inside]
    assert torch.equal(active.order[:inside].cpu().long(), order)
    assert torch.equal(active.x_PC[:inside], x[order.to(device) // k])
    count = int(active.list[0])
    entries = active.list[1:].view(3, active.most)[:, :count].t().tolist()
    assert sum(pairs for _, _, pairs in entries) == inside
    assert torch.equal((parts == 0).all(-1).t(), ids == here)


@pytest.mark.parametrize(("M", "k", "E"), [(1, 1, 1), (5, 2, 3), (130, 2, 5), (700, 3, 4)])
def test_sort_is_stable(device, M, k, E):
    from qkernels.moe.triton_pairs import sort_pairs

    generator = torch.Generator().manual_seed(M)
    ids = torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(M)])
    found, counts = sort_pairs(ids.to(device, torch.int32), E)
    assert torch.equal(found.cpu().long(), ids.flatten().sort(dim=0, stable=True).indices)
    assert counts.tolist() == [int((ids == e).sum()) for e in range(E)]


SCHEMES = {
    "w4a16-sym-g32": 2e-3,
    "w4a16-asym-g64": 2e-3,
    "w4a16-sym": 2e-3,
    "w8a16-sym-g32": 2e-3,
    "w3a16-sym-g32": 2e-3,
    "w2a16-asym-g32": 2e-3,
    "w6a16-sym-g32": 2e-3,
    "w4a16-mxfp4": 2e-3,
    "w4a16-nvfp4": 2e-3,
    "w8a8": 6e-3,  # the activation's last bit moves codes
    "w8a8-fp8": 3e-2,
    "w8a8-fp8-block": 3e-2,
    "w8a8-static": 6e-3,
    "w4a8-g32": 6e-3,
    "w4a8-channel": 6e-3,
    "w4a8-fp8-g32": 3e-2,
    "w4a8-fp8-channel": 3e-2,
    None: 2e-3,
}


@pytest.mark.parametrize("M", [1, 5, 33])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_scheme(device, half, poison, assert_close, scheme, M):
    parsed = None if scheme is None else Scheme.parse(scheme)
    blocks = scheme in ("w4a16-sym", "w8a8-fp8-block")
    hidden, inner = (128, 128) if blocks else (64, 96 if scheme is None else 64)
    weights = make_experts(parsed, hidden, inner, 5, 2, SILU, False, half)
    got, want = run(weights, M, half, device)
    assert_close(str(scheme), want, reduced(got), 2 * SCHEMES[scheme] * COARSER[half])


@pytest.mark.parametrize("M", [1, 3, 17, 33])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("scheme", ["w8a16-sym-g32", "w4a16-mxfp4"])
def test_biases_and_clamped_activation(device, half, poison, assert_close, M, shared, scheme):
    weights = make_experts(Scheme.parse(scheme), 64, 64, 4, 2, CLAMPED, True, half)
    got, want = run(weights, M, half, device, shared=shared)
    assert_close("gpt-oss", want, reduced(got), 4e-3 * COARSER[half])


@pytest.mark.parametrize("M", [1, 33])
@pytest.mark.parametrize("scheme", ["w4a16-mxfp4", "w4a16-nvfp4"])
def test_fp4_with_partial_k_step(device, half, poison, assert_close, scheme, M):
    """As in gpt-oss, whose 2880 inputs are 22.5 steps; experts have scales of their own."""
    weights = make_experts(Scheme.parse(scheme), 960, 480, 3, 2, CLAMPED, True, half)
    got, want = run(weights, M, half, device, shared=True)
    assert_close(scheme, want, reduced(got), 4e-3 * COARSER[half])


@pytest.mark.parametrize("M", [1, 5, 33])
@pytest.mark.parametrize(
    ("scheme", "inner"),
    [
        ("w4a16-sym-g32", 64),
        ("w4a16-asym-g64", 192),
        ("w8a8", 192),
        ("w8a8-fp8-block", 128),
        (None, 64),
    ],
    ids=str,
)
def test_ungated_experts(device, half, poison, assert_close, scheme, inner, M):
    """The square of ReLU; as many outputs as the second product has inputs, an odd tile count."""
    parsed = None if scheme is None else Scheme.parse(scheme)
    hidden = 128 if scheme == "w8a8-fp8-block" else 64
    weights = make_experts(parsed, hidden, inner, 5, 2, RELU2, False, half)
    got, want = run(weights, M, half, device, shared=True)
    assert_close(str(scheme), want, reduced(got), 3 * SCHEMES.get(scheme, 2e-3) * COARSER[half])


@pytest.mark.parametrize("M", [1, 33])
@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w8a8", None], ids=str)
def test_experts_with_gelu(device, half, poison, assert_close, scheme, M):
    """Gemma 4's: the tanh approximation of GELU, applied to the gate."""
    parsed = None if scheme is None else Scheme.parse(scheme)
    weights = make_experts(parsed, 64, 96, 5, 2, GEGLU, False, half)
    got, want = run(weights, M, half, device, shared=True)
    assert_close(str(scheme), want, reduced(got), 3 * SCHEMES.get(scheme, 2e-3) * COARSER[half])


@pytest.mark.parametrize("M", [1, 33])
@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w8a8", None], ids=str)
def test_experts_with_clamped_activation(device, half, poison, assert_close, scheme, M):
    """Step-3.5's: silu(gate) is cut above a limit; cut before, or not at all, it differs."""
    parsed = None if scheme is None else Scheme.parse(scheme)
    weights = make_experts(parsed, 64, 96, 5, 2, CUT_AFTER, False, half)
    got, want = run(weights, M, half, device)
    limit = 3 * SCHEMES.get(scheme, 2e-3) * COARSER[half]
    assert_close(str(scheme), want, reduced(got), limit)
    for glu in (SILU, Glu(limit=0.2)):
        other, _ = run(dataclasses.replace(weights, glu=glu), M, half, device)
        assert (reduced(other) - want).norm() > 2 * limit * want.norm()


def test_squared_relu_propagates_nan(device, half):
    """A token that is NaN stays so, and no other token sees it."""
    weights = make_experts(Scheme.parse("w4a16-sym-g32"), 64, 64, 2, 2, RELU2, True, half)
    prepared = ops.prepare_experts(weights, half, device, kernel="triton")
    x = torch.ones(3, 64, dtype=half, device=device)
    x[1] = float("nan")
    ids = torch.tensor([[0, 1]] * 3, dtype=torch.int32, device=device)
    routes = Routes(ids, torch.full((3, 2), 0.5, device=device))
    out = reduced(ops.experts(x, routes, prepared))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("split", "block_n"), [(1, 64), (2, 128)])
@pytest.mark.parametrize("variant", ["few", "sorted"])
def test_every_plan_equals_reference(device, half, poison, assert_close, variant, split, block_n):
    """Every form of the sum, and more blocks than there are experts to read."""
    weights = make_experts(Scheme.parse("w4a16-sym-g32"), 128, 64, 4, 2, SILU, True, half)
    first = ExpertsConfig(block_m=16, block_n=block_n)
    down = ExpertsConfig(block_m=16, block_n=block_n, split=split)
    plan = ExpertsPlan(variant=variant, gate_up=first, down=down, output="parts")
    got, want = run(weights, 3, half, device, plan, shared=True)
    assert got.parts.shape == (2 * split + 1, 3, 128)
    assert_close("parts", want, reduced(got), 3e-3 * COARSER[half])
    if split == 1:
        plan = ExpertsPlan(variant=variant, gate_up=first, down=first)
        got, want = run(weights, 3, half, device, plan, shared=True)
        assert_close("sum", want, got, 3e-3 * COARSER[half])


def test_equal_inputs_give_equal_bits(device, half):
    weights = make_experts(Scheme.parse("w4a16-sym-g64"), 64, 64, 3, 2, SILU, False, half)
    first, second = (run(weights, 2, half, device)[0].parts for _ in range(2))
    assert torch.equal(first, second)


def test_one_expert_gets_every_token(device, half, poison, assert_close):
    """More pairs than a block has: the expert's blocks follow each other."""
    weights = make_experts(Scheme.parse("w4a16-sym-g32"), 64, 64, 2, 2, SILU, False, half)
    config = ExpertsConfig(block_m=16, block_n=64)
    plan = ExpertsPlan(variant="sorted", gate_up=config, down=config)
    got, want = run(weights, 20, half, device, plan)
    assert_close("all", want, got, 3e-3 * COARSER[half])


def on_rank(weights, numbers, E):
    """The experts of one rank, and the numbers by which it knows all E."""
    of_rank = torch.full((E,), len(numbers), dtype=torch.int32)
    of_rank[numbers] = torch.arange(len(numbers), dtype=torch.int32)
    biases = {
        name: None if bias is None else bias[numbers]
        for name in ("gate_up_bias_EN", "down_bias_EN")
        for bias in [getattr(weights, name)]
    }
    matrices = {name: [getattr(weights, name)[e] for e in numbers] for name in ("gate_up", "down")}
    return dataclasses.replace(weights, routed_experts=E, **matrices, **biases), of_rank


@pytest.mark.parametrize("M", [1, 5, 33])
@pytest.mark.parametrize(
    ("scheme", "inner", "bias"),
    [
        ("w4a16-sym-g32", 64, False),
        ("w4a16-mxfp4", 96, True),
        ("w8a8", 64, False),
        (None, 64, True),
    ],
    ids=str,
)
def test_expert_parallel_ranks_sum_to_full_result(
    device, half, poison, assert_close, scheme, inner, bias, M
):
    """Three ranks with 4, 2 and 1 of 7 experts; a token's experts may all be elsewhere."""
    E, k, hidden = 7, 2, 128
    parsed = None if scheme is None else Scheme.parse(scheme)
    glu = CLAMPED if bias else SILU
    weights = make_experts(parsed, hidden, inner, E, k, glu, bias, half)
    generator = torch.Generator().manual_seed(M)
    x = torch.randn(M, hidden, generator=generator).to(device, half)
    logits = torch.randn(M, E, generator=generator).to(device)
    routing = Routing(num_experts=E, top_k=k, normalized=True)
    routes = reference.route(logits, routing)
    plain = reference.prepare_experts(weights, half, device)
    want = reference.experts(x, routes, plain)
    total, counted = torch.zeros(M, hidden, device=device), 0
    for numbers in ([0, 3, 5, 6], [1, 4], [2]):
        ours, of_rank = on_rank(weights, numbers, E)
        of_rank = of_rank.to(device)
        here = reference.route(logits, routing, None, of_rank)
        counted += int((here.ids_Mk < len(numbers)).sum())
        prepared = ops.prepare_experts(ours, half, device, kernel="triton")
        found = reduced(ops.experts(x, here, prepared))
        of_plain = reference.prepare_experts(ours, half, device)
        assert_close("rank", reference.experts(x, here, of_plain), found, 2e-2 * COARSER[half])
        total += found.float()
    assert counted == M * k
    assert_close("all", want, total.to(half), 2 * (SCHEMES[scheme] + 2e-3) * COARSER[half])


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("variant", ["few", "sorted"])
def test_every_plan_with_experts_of_other_ranks(
    device, half, poison, assert_close, variant, shared
):
    """Every form of the sum; one token has no expert here."""
    weights = make_experts(Scheme.parse("w4a16-sym-g32"), 128, 64, 4, 2, SILU, True, half)
    ours, _ = on_rank(weights, [1, 2], 4)
    ids = torch.tensor([[0, 2], [2, 2], [1, 0]], dtype=torch.int32, device=device)
    routes = Routes(ids, torch.tensor([[0.3, 0.7]] * 3, device=device))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(device, half)
    extra = x.flip(0) if shared else None
    want = reference.experts(x, routes, reference.prepare_experts(ours, half, device), None, extra)
    prepared = ops.prepare_experts(ours, half, device, kernel="triton")
    first = ExpertsConfig(block_m=16, block_n=64)
    down = dataclasses.replace(first, split=2)
    for settings in ({"down": down, "output": "parts"}, {"down": first}):
        plan = ExpertsPlan(variant=variant, gate_up=first, **settings)
        got = ops.experts(x, routes, prepared, plan, extra)
        assert_close(str(settings), want, reduced(got), 3e-3 * COARSER[half])


def test_expert_ids_are_mapped_to_local_ids(device, half):
    from qkernels.moe.triton_route import route, route_tokens

    routing = ROUTINGS["glm"]
    generator = torch.Generator().manual_seed(3)
    E = routing.num_experts
    numbers = torch.randperm(E, generator=generator).to(torch.int32).to(device)
    logits = torch.randn(7, E, generator=generator).to(device, half)
    found, plain = (route(logits, routing, None, each) for each in (numbers, None))
    assert torch.equal(found.ids_Mk, numbers[plain.ids_Mk.long()])
    assert torch.equal(found.weights_Mk, plain.weights_Mk)
    x, weight = torch.randn(2, 32).to(device, half), torch.randn(E, 32).to(device, half)
    found, plain = (
        route_tokens(x, weight, routing, None, None, False, each) for each in (numbers, None)
    )
    assert torch.equal(found.ids_Mk, numbers[plain.ids_Mk.long()])
