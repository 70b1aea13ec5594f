"""Experts with 4-bit weights and 8-bit inputs against sums in float64, at odd sizes."""

import pytest
import torch

from formats.scheme import Scheme
from qkernels import ops, reference
from qkernels.moe.config import ExpertsConfig, ExpertsPlan
from qkernels.moe.routing import GEGLU, RELU2, SILU, Routes, Routing
from qkernels.operands.split_k import reduced
from tests.qkernels.moe_case import make_experts

# (scheme, hidden, inner, activation): groups of one or three K steps, K steps of 32, 64 and 128,
# one to nine tiles of outputs
CASES = {
    "w4a8-g32": (64, 96, SILU),
    "w4a8-g64": (192, 64, GEGLU),
    "w4a8-g128": (128, 256, RELU2),
    "w4a8-g192": (192, 384, SILU),
    "w4a8-channel": (192, 96, SILU),
    "w4a8-fp8-g32": (64, 160, SILU),
    "w4a8-fp8-channel": (320, 64, RELU2),
}
ERROR = {
    "int": 3e-3,
    "float": 6e-3,
}  # in float16; a hidden value at the edge of two codes may get the other


def rounded(x, activation):
    """x as its codes say, in float64: a scale for each row."""
    x = x.double()
    most = 127.0 if activation.type == "int" else 448.0
    scale = x.abs().amax(1, keepdim=True) / most
    if activation.type == "int":
        return (x / scale).round().clamp(-128, 127) * scale
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def activated(sums, glu, dtype):
    """Rounded where a model rounds: the product, the activation, their product."""
    y = sums.to(dtype).double()
    if glu == RELU2:
        return y.relu().square().to(dtype)
    gate, up = y.chunk(2, 1)
    if glu == SILU:
        act = gate * gate.sigmoid()
    else:
        act = torch.nn.functional.gelu(gate, approximate="tanh")
    return (act.to(dtype).double() * up).to(dtype)


def in_float64(x, routes, weights, activation, dtype):
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, shares) in enumerate(zip(*(each.tolist() for each in routes), strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            if expert == len(weights.down):
                continue  # elsewhere
            sums = [rounded(x[token : token + 1].cpu(), activation)]
            for name in ("gate_up", "down"):
                matrix = getattr(weights, name)[expert]
                codes = matrix.codes().double() - 8
                groups = matrix.scales_NG.shape[1]
                real = codes.unflatten(1, (groups, -1)) * matrix.scales_NG.double()[..., None]
                y = sums[-1] @ real.flatten(1).t()
                bias = getattr(weights, f"{name}_bias_EN")
                if bias is not None:
                    y += bias[expert].to(dtype).double()
                sums.append(y)
                if name == "gate_up":
                    hidden = activated(y, weights.glu, dtype)
                    sums.append(rounded(hidden, activation))
            total[token] += share * sums[-1][0]
    return total


def case(scheme, M, E, k, half, device, bias=False):
    hidden, inner, glu = CASES[scheme]
    weights = make_experts(Scheme.parse(scheme), hidden, inner, E, k, glu, bias, half)
    generator = torch.Generator().manual_seed(M)
    x = torch.randn(M, hidden, generator=generator).to(device, half)
    logits = torch.randn(M, E, generator=generator).to(device)
    return weights, x, reference.route(logits, Routing(num_experts=E, top_k=k, normalized=True))


def allowed(scheme, half):
    return ERROR[Scheme.parse(scheme).activation.type] * (1 if half is torch.float16 else 6)


@pytest.mark.parametrize(("M", "bias"), [(1, False), (3, True), (33, False)])
@pytest.mark.parametrize("scheme", CASES)
def test_experts_equal_float64(device, half, poison, assert_close, scheme, M, bias):
    weights, x, routes = case(scheme, M, 4, 2, half, device, bias)
    prepared = ops.prepare_experts(weights, half, device, kernel="triton")
    assert prepared.problem.kernel == "triton" and prepared.problem.kind == "w4a8"
    want = in_float64(x, routes, weights, Scheme.parse(scheme).activation, half)
    got = reduced(ops.experts(x, routes, prepared))
    assert_close(scheme, want, got, allowed(scheme, half))


@pytest.mark.parametrize("variant", ["few", "sorted"])
@pytest.mark.parametrize("scheme", ["w4a8-g32", "w4a8-channel"])
def test_splits_with_experts_of_other_ranks(device, half, poison, assert_close, scheme, variant):
    """Partial sums of every split; one token has no expert here, and no block writes for it."""
    weights, x, _ = case(scheme, 3, 2, 2, half, device)
    weights = type(weights)(
        **{name: getattr(weights, name) for name in ("top_k", "gate_up", "down", "glu")},
        routed_experts=5,
    )
    ids = torch.tensor([[0, 2], [2, 2], [1, 0]], dtype=torch.int32, device=device)
    routes = Routes(ids, torch.tensor([[0.3, 0.7]] * 3, device=device))
    prepared = ops.prepare_experts(weights, half, device, kernel="triton")
    first = ExpertsConfig(block_m=16, block_n=64)
    down = ExpertsConfig(block_m=16, block_n=64, split=3)
    want = in_float64(x, routes, weights, Scheme.parse(scheme).activation, half)
    for settings in ({"down": down, "output": "parts"}, {"down": first}):
        plan = ExpertsPlan(variant=variant, gate_up=first, **settings)
        got = reduced(ops.experts(x, routes, prepared, plan))
        assert_close(str(settings), want, got, allowed(scheme, half))
        assert not got[1].any()


def test_integer_sums_have_a_fixed_order(device, half):
    """A token's bits do not depend on the others: each alone, and all together."""
    weights, x, routes = case("w4a8-g32", 40, 3, 2, half, device)
    prepared = ops.prepare_experts(weights, half, device, kernel="fixed_order")
    together = ops.experts(x, routes, prepared)
    for token in (0, 17, 39):
        row = slice(token, token + 1)
        alone = ops.experts(x[row], Routes(*(each[row] for each in routes)), prepared)
        assert torch.equal(reduced(alone), reduced(together)[row])


def test_refusals_name_the_reason(device):
    from qkernels.moe.rows import triton_experts
    from qkernels.problem import Problem

    def reason(scheme, hidden=128, inner=64, **changes):
        parsed = Scheme.parse(scheme)
        problem = Problem(
            device="cuda",
            dtype=torch.float16,
            spec=parsed.weight,
            activation=parsed.activation,
            out_features=hidden,
            in_features=inner,
            **changes,
        )
        return triton_experts(problem)

    assert reason("w4a8-g32") is None and reason("w4a8-channel") is None
    assert "groups divisible by 32, not 128 of 64" in reason("w4a8")
    assert "at most 32768 inputs, not 65536" in reason("w4a8-g32", hidden=65536)
    assert "depends on the number of tokens" in reason("w4a8-fp8-g32", requested="fixed_order")
    assert reason("w4a8-g32", requested="fixed_order") is None
