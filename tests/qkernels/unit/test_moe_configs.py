"""How the experts of a layer run M tokens: plans for real models on several GPUs, without one."""

import re

import pytest
import torch

from formats.in_memory.weights import round_to_nearest
from formats.scheme import Scheme
from qkernels import ops
from qkernels.choice import parse_choice
from qkernels.errors import KernelError
from qkernels.moe.config import MAX_PARTIALS, MAX_PARTS, num_blocks, sort_chunk
from qkernels.moe.experts import ExpertWeights
from qkernels.moe.routing import RELU2, SILU, Routing
from qkernels.moe.sm90_few_tokens_config import FewTokensConfig, few_tokens_config_fault
from qkernels.moe.stack import glu_order, stack_fault
from qkernels.moe.variants import Layer, plan_experts
from qkernels.operations import explain
from tests.qkernels.moe_case import make_experts

# hidden size, inner size, experts, experts of a token
MODELS = [(4096, 14336, 8, 2), (2048, 768, 128, 8), (2880, 2880, 32, 4), (4096, 1408, 128, 8)]
SPEC = Scheme.parse("w4a16-sym-g32").weight


def plan(
    M,
    model=MODELS[1],
    shared_kb=227,
    scheme="w4a16-sym",
    choice=None,
    lacks_sm90="no",
    gated=True,
    gelu=False,
    cut_after=False,
):
    """Plan with the portable kernels by default."""
    hidden, inner, E, k = model
    layer = Layer(
        kind="packed",
        spec=Scheme.parse(scheme).weight,
        num_experts=E,
        top_k=k,
        hidden=hidden,
        inner=inner,
        gated=gated,
        gelu=gelu,
        cut_after=cut_after,
        sm_count=132,
        shared_bytes=shared_kb * 1024,
        lacks_sm90=lacks_sm90,
    )
    return plan_experts(layer, M, parse_choice(choice))


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("M", [1, 2, 7, 8, 31, 32, 33, 64, 500, 4096])
def test_plans_satisfy_kernel_limits(model, M):
    """A tile of few tokens has room for all of them; sums of parts fit the norm that adds them."""
    hidden, inner, _, k = model
    found = plan(M, model)
    if found.variant == "few":
        assert found.gate_up.block_m >= M and found.down.block_m >= M
    if found.output == "parts":
        assert found.down.split * k <= MAX_PARTS
        assert found.down.split * k * M * hidden <= MAX_PARTIALS
        assert 1 <= found.down.split <= inner // 32
    assert found.gate_up.split == 1, "an activation has no parts"
    assert 2 * inner % found.gate_up.block_n == 0 == hidden % found.down.block_n


@pytest.mark.parametrize("model", [(4096, 14336, 8, 2), (2048, 768, 128, 8), (4096, 1408, 128, 8)])
@pytest.mark.parametrize("M", [1, 2, 8, 9, 32, 64])
def test_sm90_few_token_plans_are_valid(model, M):
    """Its configs run as they are; sums of parts fit the norm that adds them."""
    hidden, inner, _, k = model
    found = plan(M, model, lacks_sm90=None)
    assert found.variant == "sm90_few_tokens"
    assert found.output == "parts" or k * M * hidden > MAX_PARTIALS
    assert found.gate_up.block_m == found.down.block_m, "they share the list of entries"
    assert found.gate_up.sorts == found.down.sorts == (M > 8)
    for config, N, K in ((found.gate_up, 2 * inner, hidden), (found.down, hidden, inner)):
        assert few_tokens_config_fault(config, M=M, N=N, K=K) is None
        threads = 128 * (config.num_consumers + 1)
        assert config.blocks_per_sm * threads * config.registers <= 2**16
        given = config.num_consumers * config.consumer_registers + config.producer_registers
        assert given <= (config.num_consumers + 1) * config.registers
        assert max(config.consumer_registers, config.registers) <= 255
    assert found.gate_up.split == 1, "an activation has no parts"
    if found.output == "parts":
        assert found.down.split * k <= MAX_PARTS
        assert found.down.split * k * M * hidden <= MAX_PARTIALS
    else:
        assert found.down.split == 1


@pytest.mark.parametrize(
    ("M", "scheme", "choice", "lacks", "variant"),
    [
        (32, "w4a16-sym", None, None, "sm90_few_tokens"),
        (128, "w4a16-sym", None, None, "sm90_few_tokens"),
        (129, "w4a16-sym", None, None, "sorted"),
        (129, "w4a16-sym", "sm90_few_tokens", None, "sorted"),
        (8, "w4a16-sym", "sm90_few_tokens", "no sm_90", "few"),
        (8, "w4a16-sym", "-sm90_few_tokens", None, "few"),
        (8, "w4a16-sym", "-few,-sm90_few_tokens", None, "sorted"),
        (8, "w4a16-sym", "few", None, "few"),
        (8, "w4a16-sym-g64", None, None, "sm90_few_tokens"),
        (32, "w4a16-asym-g32", None, None, "sm90_few_tokens"),
        (8, "w4a16-sym-g64", "fixed_order", None, "sm90_few_tokens"),
        (8, "w4a16-sym-g96", None, None, "few"),
        (8, "w8a16-sym", None, None, "few"),
    ],
)
def test_variant_by_number_of_tokens(M, scheme, choice, lacks, variant):
    found = plan(M, scheme=scheme, choice=choice, lacks_sm90=lacks)
    assert found.variant == variant


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        ({"block_m": 8}, "at least the 9 tokens"),
        ({"block_m": 64}, r"block_m must be of \(8, 16, 32\)"),
        ({"num_consumers": 3}, "1536 outputs divisible by 64 times that"),
        ({"split": 17}, "split must be 1 to 16"),
        ({"stages": 1}, "stages 2 to"),
        ({"blocks_per_sm": 5}, "1 to 4, found 5"),
    ],
)
def test_faults_of_configs_for_few_tokens(numbers, fault):
    config = FewTokensConfig(**{"block_m": 16} | numbers)
    assert re.search(fault, few_tokens_config_fault(config, M=9, N=1536, K=2048))


def test_stages_shrink_with_shared_memory():
    stages = [plan(4096, MODELS[0], shared_kb).down.stages for shared_kb in (227, 99, 64)]
    assert stages == [3, 2, 2]


@pytest.mark.parametrize("E", [1, 5, 128])
@pytest.mark.parametrize("P", [1, 16, 17, 700])
def test_number_of_blocks_covers_worst_case_routing(E, P):
    config = plan(64).gate_up
    used = min(E, P)
    # all experts but one have a single pair
    counts = [1] * (used - 1) + [P - used + 1]
    worst = sum(-(-count // config.block_m) for count in counts)
    even = sum(-(-len(range(e, P, used)) // config.block_m) for e in range(used))
    assert max(worst, even) <= num_blocks(config, P, E) <= P


def test_sort_reads_at_most_a_block_at_a_time():
    assert [sort_chunk(P) for P in (1, 129, 5000)] == [128, 256, 2048]


def test_gate_and_up_interleave_every_eight_rows():
    order = glu_order(24, torch.device("cpu")).tolist()
    assert order[:16] == [*range(8), *range(24, 32)] and order[16:24] == [*range(8, 16)]
    assert sorted(order) == list(range(48))


def weights(N=32, K=32, count=2, **different):
    rounded = [round_to_nearest(torch.randn(64, 32), SPEC) for _ in range(count)]
    down = [round_to_nearest(torch.randn(N, K), SPEC) for _ in range(count)]
    return ExpertWeights(**{"top_k": 1, "gate_up": rounded, "down": down, "glu": SILU, **different})


def test_different_experts_are_not_stacked():
    mixed = [torch.randn(32, 32), weights().down[0]]
    assert "differ in shape or numerics" in stack_fault(mixed)
    assert stack_fault(weights().down) is None
    prepared = ops.prepare_experts(weights(down=mixed), torch.float32, "cpu")
    assert prepared.problem.kernel == "reference"


def test_incompatible_experts_are_refused():
    with pytest.raises(KernelError, match=r"experts gate_up: expected 2 of \[64, 64\]"):
        ops.prepare_experts(weights(N=64), torch.float32, "cpu")
    with pytest.raises(KernelError, match=r"experts down bias: expected \[2, 32\], found \[2, 3\]"):
        ops.prepare_experts(weights(down_bias_EN=torch.zeros(2, 3)), torch.float32, "cpu")
    with pytest.raises(KernelError, match="6 of 8 experts cannot be chosen from 1 of 2 groups"):
        Routing(num_experts=8, top_k=6, num_groups=2, top_groups=1)
    prepared = ops.prepare_experts(weights(), torch.float32, "cpu")
    routes = ops.route(torch.randn(3, 2), Routing(num_experts=2, top_k=2))
    with pytest.raises(KernelError, match=r"experts ids: expected \[3, 1\], found \[3, 2\]"):
        ops.experts(torch.randn(3, 32), routes, prepared)


def test_ungated_expert_shapes_are_checked():
    up = [round_to_nearest(torch.randn(32, 32), SPEC) for _ in range(2)]
    prepared = ops.prepare_experts(weights(gate_up=up, glu=RELU2), torch.float32, "cpu")
    assert not prepared.problem.gated
    with pytest.raises(KernelError, match=r"experts gate_up: expected 2 of \[32, 32\]"):
        ops.prepare_experts(weights(glu=RELU2), torch.float32, "cpu")


@pytest.mark.parametrize(("inner", "reason"), [(1856, None), (1888, "an inner one by 64")])
def test_ungated_expert_sizes(inner, reason):
    """Nemotron 3 Nano has 1856; the kernel for few tokens on sm_90 takes experts with a gate."""
    found = explained_experts("w4a16-sym-g32", (2688, inner), gated=False)[0]
    assert found.taken == (reason is None)
    assert reason is None or reason in found.reason
    variant = plan(1, (2048, 768, 128, 6), lacks_sm90=None, gated=False).variant
    assert variant == "few" != plan(1, (2048, 768, 128, 6), lacks_sm90=None).variant


def test_gelu_experts_use_portable_kernels():
    """Gemma 4's; the kernel for few tokens on sm_90 computes SiLU alone."""
    variants = [plan(1, lacks_sm90=None, gelu=gelu).variant for gelu in (True, False)]
    assert variants == ["few", "sm90_few_tokens"]


def test_clamped_activation_experts_use_portable_kernels():
    """Step-3.5's last layers; the kernel for few tokens on sm_90 cuts the gate before."""
    variants = [plan(1, lacks_sm90=None, cut_after=cut).variant for cut in (True, False)]
    assert variants == ["few", "sm90_few_tokens"]


def explained_experts(scheme, sizes, requested=None, gated=True):
    parsed = Scheme.parse(scheme)
    return explain(
        "experts",
        device="cuda",
        dtype=torch.bfloat16,
        spec=parsed.weight,
        activation=parsed.activation,
        out_features=sizes[0],
        in_features=sizes[1],
        requested=requested,
        gated=gated,
    )


@pytest.mark.parametrize(
    ("scheme", "sizes", "reason"),
    [
        ("w4a16-sym", (2048, 768), None),
        ("w4a16-sym-g32", (2880, 2880), None),
        ("w8a8-fp8-block", (2048, 768), None),
        ("w2a16-sym", (2048, 768), None),
        ("w4a16-sym", (2048, 736), "not 128 of 736"),
        ("w4a16-sym-g8", (2048, 768), "takes groups divisible by 32, not 8"),
        ("w8a8", (2040, 768), "takes a hidden size divisible by 64"),
        ("w8a8-fp8-block", (2048, 1440), "divisible by 128"),
        ("w8a16-fp8", (2048, 768), "takes integer weights, GGUF blocks and 4-bit floats"),
    ],
)
def test_explain_says_which_experts_run_in_triton(scheme, sizes, reason):
    triton = explained_experts(scheme, sizes)[0]
    assert triton.taken == (reason is None)
    assert reason is None or reason in triton.reason


@pytest.mark.parametrize(
    ("scheme", "sizes", "requested", "reason"),
    [
        ("w4a16-sym", (2048, 768), None, "few tokens of an expert"),
        ("w4a16-sym", (2048, 768), "-sm90_few_tokens", "forbidden by name"),
        ("w4a16-sym", (2048, 768), "sm90_few_tokens", "requested, so used wherever it can run"),
        ("w4a16-sym-g32", (2880, 2880), None, "few tokens of an expert"),
        (
            "w4a16-sym-g96",
            (2880, 2880),
            None,
            "takes groups of 32, 64 or multiples of 128, found 96",
        ),
        ("w8a16-sym", (2048, 768), None, "takes 4-bit weights"),
        ("w8a8", (2048, 768), None, "takes 4-bit weights"),
    ],
)
def test_explain_says_which_experts_the_sm90_kernel_takes(scheme, sizes, requested, reason):
    found = explained_experts(scheme, sizes, requested)
    of_variant = {choice.name: choice.reason for choice in found.variants}
    assert reason in of_variant["sm90_few_tokens"]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_fixed_order_plan_has_one_split(model):
    for M in (1, 2, 8, 31, 32, 33, 500, 8000):
        found = plan(M, model, choice="fixed_order", lacks_sm90=None)
        assert (found.gate_up.split, found.down.split, found.output) == (1, 1, "sum")
    assert plan(1, model, choice="fixed_order", lacks_sm90=None).variant == "sm90_few_tokens"
    default = [plan(M, model, choice="few") for M in (1, 8)]
    assert any(each.down.split > 1 or each.output == "parts" for each in default)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_fixed_order_token_bits_are_independent_on_cpu(scores):
    """6 experts of 24 inputs: a CPU's vectors would hold parts of several tokens."""
    generator = torch.Generator().manual_seed(1)
    weights = make_experts(None, 24, 40, 6, 2, SILU, False, torch.float32)
    prepared = ops.prepare_experts(weights, torch.float32, "cpu", kernel="fixed_order")
    routing = Routing(num_experts=6, top_k=2, scores=scores, normalized=True)
    router_EC, x_MC = (torch.randn(n, 24, generator=generator) for n in (6, 37))

    def run(x_MC):
        routes = ops.route_tokens(x_MC, router_EC, routing, fixed_order=True)
        return routes.weights_Mk, ops.experts(x_MC, routes, prepared)

    whole = run(x_MC)
    for first, count in ((0, 1), (3, 5), (20, 17), (36, 1)):
        for got, want in zip(run(x_MC[first : first + count]), whole, strict=True):
            assert torch.equal(got, want[first : first + count])
    exact = ops.experts(
        x_MC,
        ops.route_tokens(x_MC, router_EC, routing),
        ops.prepare_experts(weights, torch.float32, "cpu"),
    )
    torch.testing.assert_close(whole[1], exact, rtol=1e-5, atol=1e-5)
