"""W4A16 and 4-bit float experts for few tokens against float64, on an sm_90 GPU."""

import dataclasses
import functools

import pytest
import torch
from torch.nn import functional

from formats.scheme import Scheme
from qkernels import ops, reference
from qkernels.choice import parse_choice
from qkernels.moe.experts import ExpertWeights, PreparedExperts
from qkernels.moe.routing import SILU, Glu, Routes, Routing
from qkernels.moe.variants import layer_of, plan_experts
from qkernels.operands.split_k import reduced
from tests.qkernels.moe_case import make_experts

pytestmark = pytest.mark.hopper

HIDDEN, INNER, E, K = 384, 256, 9, 3  # the first is 3 K steps, the second 2; 12 and 6 stored tiles
CLAMPED = Glu(alpha=1.702, offset=1.0, limit=0.7)
VARIANT = "sm90_few_tokens"


@functools.lru_cache(maxsize=4)
def prepare(scheme, dtype, *, hidden=HIDDEN, inner=INNER, num_experts=E, top_k=K, **different):
    settings = {"glu": SILU, "bias": False} | different
    weights = make_experts(
        Scheme.parse(scheme), hidden, inner, num_experts, top_k, dtype=dtype, **settings
    )
    return weights, ops.prepare_experts(weights, dtype, "cuda", kernel=VARIANT)


def random_x(M: int, C: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(M + C)
    return torch.randn(M, C, device="cuda", generator=generator).to(dtype)


def random_routes(M: int, num_experts: int, top_k: int, seed: int = 0) -> Routes:
    generator = torch.Generator("cuda").manual_seed(100 * M + seed)
    logits = torch.randn(M, num_experts, device="cuda", generator=generator)
    return reference.route(logits, Routing(num_experts=num_experts, top_k=top_k, normalized=True))


def want(x: torch.Tensor, routes: Routes, weights: ExpertWeights) -> torch.Tensor:
    """Return the result in float64, rounded like the kernel: after gate_up and the activation."""
    total = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    matrices = zip(weights.gate_up, weights.down, strict=True)
    for expert, (gate_up, down) in enumerate(matrices):
        token, choice = (routes.ids_Mk == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        gate_up, down = (
            each.to(torch.device("cuda")).dequantize(torch.float64) for each in (gate_up, down)
        )
        hidden = x[token].double() @ gate_up.t()
        if weights.gate_up_bias_EN is not None:
            hidden += weights.gate_up_bias_EN[expert].to("cuda", x.dtype).double()
        gate, up = hidden.to(x.dtype).double().chunk(2, -1)
        glu = weights.glu
        if glu == SILU:
            act = functional.silu(gate)
        else:
            gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
            act = gate * torch.sigmoid(glu.alpha * gate)
        act = (act.to(x.dtype).double() * (up + glu.offset)).to(x.dtype).double()
        out = act @ down.t()
        if weights.down_bias_EN is not None:
            out += weights.down_bias_EN[expert].to("cuda", x.dtype).double()
        total.index_add_(0, token, out * routes.weights_Mk[token, choice, None].double())
    return total


@pytest.fixture
def check(assert_close, tolerance):
    """One call, twice, with a plan whose configs have these fields."""

    def run(
        weights: ExpertWeights,
        prepared: PreparedExperts,
        x: torch.Tensor,
        routes: Routes,
        shared: torch.Tensor | None = None,
        **config: object,
    ) -> None:
        plan = ops.plan_experts(prepared, len(x))
        assert plan.variant == VARIANT
        of_gate_up = {name: value for name, value in config.items() if name != "split"}
        plan = dataclasses.replace(
            plan,
            gate_up=dataclasses.replace(plan.gate_up, **of_gate_up),
            down=dataclasses.replace(plan.down, **config),
        )
        got = ops.experts(x, routes, prepared, plan, shared)
        expected = want(x, routes, weights) + (0 if shared is None else shared.double())
        again = ops.experts(x, routes, prepared, plan, shared)
        assert torch.equal(reduced(got), reduced(again)), "equal inputs, equal bits"
        assert_close(f"{config}", expected, reduced(got), 2 * tolerance(x.dtype))

    return run


SCHEMES = ["w4a16-sym", "w4a16-asym-g384", "w4a16-sym-g64", "w4a16-asym-g64", "w4a16-asym-g32"]
SCHEMES += ["w4a16-mxfp4", "w4a16-nvfp4"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("M", [1, 2, 3, 7, 8, 9, 15, 24, 40, 100])
def test_numbers_of_tokens(check, half, poison, scheme, M):
    inner = 384 if "g384" in scheme else INNER
    weights, prepared = prepare(scheme, half, inner=inner)
    check(weights, prepared, random_x(M, HIDDEN, half), random_routes(M, E, K))


# tokens, block_m, sorted pairs, consumers, stages, blocks of an SM, split of down
CONFIGS = [
    (1, 8, False, 1, 2, 4, 2),
    (1, 8, True, 2, 8, 1, 1),
    (5, 8, True, 2, 3, 2, 2),
    (5, 16, False, 1, 8, 2, 1),
    (5, 32, False, 1, 3, 1, 1),
    (20, 32, False, 2, 2, 2, 2),
    (20, 32, True, 2, 2, 2, 2),
]


@pytest.mark.parametrize(
    "scheme", ["w4a16-asym", "w4a16-asym-g64", "w4a16-asym-g32", "w4a16-mxfp4", "w4a16-nvfp4"]
)
@pytest.mark.parametrize("numbers", CONFIGS, ids=str)
def test_every_config(check, poison, numbers, scheme):
    """Fewer K steps than stages, and more; splits of one K step."""
    M, block_m, sorts, num_consumers, stages, blocks_per_sm, split = numbers
    weights, prepared = prepare(scheme, torch.bfloat16)
    check(
        weights,
        prepared,
        random_x(M, HIDDEN, torch.bfloat16),
        random_routes(M, E, K),
        block_m=block_m,
        sorts=sorts,
        split=split,
        num_consumers=num_consumers,
        stages=stages,
        blocks_per_sm=blocks_per_sm,
    )


@pytest.mark.parametrize("M", [1, 8, 31])
@pytest.mark.parametrize("of", ["one crowd", "two crowds", "each its own", "last expert"])
def test_uneven_routing(check, poison, M, of):
    """From all tokens at the same experts to as few as possible; blocks without any work."""
    num_experts = 96 if of == "each its own" else E
    weights, prepared = prepare("w4a16-sym", torch.bfloat16, num_experts=num_experts)
    first = {
        "one crowd": [0] * M,
        "two crowds": [3 * (m % 2) for m in range(M)],
        "each its own": [3 * m for m in range(M)],
        "last expert": [E - K] * M,
    }[of]
    ids = torch.tensor([[e + K - 1 - j for j in range(K)] for e in first])
    shares = torch.rand(M, K, generator=torch.Generator().manual_seed(M))
    routes = Routes(ids.to("cuda", torch.int32), shares.to("cuda"))
    check(weights, prepared, random_x(M, HIDDEN, torch.bfloat16), routes)


@pytest.mark.parametrize("M", [1, 6, 32])
def test_biases_clamped_activation_and_a_shared_expert(check, half, poison, M):
    """With parts that the next norm adds."""
    weights, prepared = prepare("w4a16-asym", half, glu=CLAMPED, bias=True)
    x = random_x(M, HIDDEN, half)
    check(weights, prepared, x, random_routes(M, E, K), random_x(M, HIDDEN, half))
    check(weights, prepared, x, random_routes(M, E, K), split=2)


@pytest.mark.parametrize("M", [1, 6, 32, 70])
@pytest.mark.parametrize("scheme", ["w4a16-mxfp4", "w4a16-nvfp4"])
def test_fp4_with_partial_k_step(check, half, poison, M, scheme):
    """As in gpt-oss: 11.5 steps, the other half of the last one is padding."""
    sizes = {"hidden": 1472, "inner": 1472, "glu": CLAMPED, "bias": True}
    weights, prepared = prepare(scheme, half, **sizes)
    x, shared = random_x(M, 1472, half), random_x(M, 1472, half)
    check(weights, prepared, x, random_routes(M, E, K), shared)


@pytest.mark.parametrize("M", [1, 6, 32, 70])
@pytest.mark.parametrize("scheme", ["w4a16-sym-g64", "w4a16-asym-g32"])
def test_last_k_step_with_fewer_groups(check, half, poison, M, scheme):
    """11.5 and 2.5 steps; the last one also loads codes and scales of the next tile."""
    weights, prepared = prepare(scheme, half, hidden=1472, inner=320)
    check(weights, prepared, random_x(M, 1472, half), random_routes(M, E, K))


@pytest.mark.parametrize("M", [1, 8, 32])
@pytest.mark.parametrize("scheme", ["w4a16-sym", "w4a16-asym-g64", "w4a16-sym-g32"])
def test_bits_equal_portable_kernels(half, poison, M, scheme):
    """Without split-K all variants add the same numbers in the same order."""
    _, prepared = prepare(scheme, half)
    x, routes = random_x(M, HIDDEN, half), random_routes(M, E, K)
    found = {}
    for choice in (VARIANT, "few", "sorted"):
        never = {"few": f"-{VARIANT}", "sorted": f"-{VARIANT},-few"}.get(choice, choice)
        plan = plan_experts(layer_of(prepared.problem), M, parse_choice(never))
        assert plan.variant == choice
        plan = dataclasses.replace(plan, down=dataclasses.replace(plan.down, split=1), output="sum")
        found[choice] = ops.experts(x, routes, prepared, plan)
    assert torch.equal(found[VARIANT], found["few"])
    assert torch.equal(found[VARIANT], found["sorted"])


@pytest.mark.parametrize("M", [1, 8, 32, 70])
@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts", "top_k"),
    [(2048, 768, 32, 8), (2048, 1792, 8, 2), (1024, 1408, 16, 6)],
)
def test_more_tiles_than_blocks(check, poison, hidden, inner, num_experts, top_k, M):
    """Each block goes from an expert to the next."""
    sizes = {"hidden": hidden, "inner": inner, "num_experts": num_experts, "top_k": top_k}
    weights, prepared = prepare("w4a16-sym", torch.bfloat16, **sizes)
    x = random_x(M, hidden, torch.bfloat16)
    check(weights, prepared, x, random_routes(M, num_experts, top_k))


@pytest.mark.parametrize("M", [1, 4])
def test_captured_layers_read_new_tokens(half, M):
    """Kernels start while those before them end: down reads its first weights before gate_up ends.

    Two layers share memory, and each replay wants other experts.
    """
    routing = Routing(num_experts=E, top_k=K, normalized=True)
    layers = [prepare("w4a16-sym", half, seed=seed) for seed in range(2)]
    routers = [random_x(E, HIDDEN, half) for _ in layers]
    spec = ops.NormSpec(weight_C=torch.ones(HIDDEN, device="cuda", dtype=half), eps=1e-6)
    x = random_x(M, HIDDEN, half)

    def both():
        total, normed, seen = torch.zeros_like(x), x, []
        for (_, prepared), router in zip(layers, routers, strict=True):
            routes = ops.route_tokens(normed, router, routing)
            out = ops.experts(normed, routes, prepared)
            seen.append((normed, routes, out))
            normed, total = ops.norm(out, total, spec)
        return seen

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = both()
    for _ in range(20):
        x.normal_()
        graph.replay()
        for (given, routes, out), (weights, _) in zip(seen, layers, strict=True):
            expected = want(given, routes, weights)
            error = (reduced(out).double() - expected).norm() / expected.norm()
            assert float(error) < 1e-2


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w4a16-mxfp4"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("M", [1, 2, 8, 9, 40, 300])
def test_experts_of_other_ranks_add_nothing(assert_close, tolerance, poison, scheme, shared, M):
    """A rank with experts 2, 3, 5 and 8 of 9; parts of the others are cleared, not computed."""
    here = [2, 3, 5, 8]
    glu = CLAMPED if scheme == "w4a16-mxfp4" else SILU
    weights, _ = prepare(scheme, torch.bfloat16, glu=glu, bias=glu == CLAMPED)
    biases = {
        name: None if bias is None else bias[here]
        for name in ("gate_up_bias_EN", "down_bias_EN")
        for bias in [getattr(weights, name)]
    }
    matrices = {name: [getattr(weights, name)[e] for e in here] for name in ("gate_up", "down")}
    ours = dataclasses.replace(weights, routed_experts=E, **matrices, **biases)
    prepared = ops.prepare_experts(ours, torch.bfloat16, "cuda")
    numbers_E = torch.full((E,), len(here), dtype=torch.int32, device="cuda")
    numbers_E[here] = torch.arange(len(here), dtype=torch.int32, device="cuda")
    routes = random_routes(M, E, K)
    if M > 1:  # a token without experts here
        routes.ids_Mk[1] = torch.tensor([0, 1, 4], dtype=torch.int32)
    local = Routes(numbers_E[routes.ids_Mk.long()], routes.weights_Mk)
    x = random_x(M, HIDDEN, torch.bfloat16)
    extra = random_x(M, HIDDEN, torch.bfloat16).flip(0) if shared else None
    plan = ops.plan_experts(prepared, M)
    assert M > 40 or plan.variant == VARIANT
    found, again = (reduced(ops.experts(x, local, prepared, None, extra)) for _ in range(2))
    assert torch.equal(found, again), "equal inputs, equal bits"
    expected = want(x, local, ours) + (0 if extra is None else extra.double())
    assert_close(f"{plan.variant}", expected, found, 2 * tolerance(x.dtype))
    none_here = Routes(torch.full_like(local.ids_Mk, len(here)), local.weights_Mk)
    nothing = reduced(ops.experts(x, none_here, prepared, None, extra))
    assert torch.equal(nothing, torch.zeros_like(x) if extra is None else extra)
