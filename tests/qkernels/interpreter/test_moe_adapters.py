"""Adapters of experts: the kernels against merged weights, interpreted on a CPU, or on a GPU."""

from dataclasses import replace

import pytest
import torch

from formats.scheme import Scheme
from qkernels import ops, reference
from qkernels.moe.adapted.weights import ExpertAdapters
from qkernels.moe.reference import glu
from qkernels.moe.routing import GEGLU, RELU2, SILU, Glu, Routes, Routing
from tests.qkernels.moe_case import COARSER, expert_lora, make_experts, merged_experts

CLAMPED = Glu(alpha=1.702, offset=1.0, limit=0.7)
# scheme, activation, (hidden, inner), experts, experts of a token, has biases
CASES = {
    "float": (None, SILU, (64, 96), 5, 2, False),
    "int4": ("w4a16-sym-g32", SILU, (64, 64), 5, 2, False),
    "gpt-oss": ("w4a16-mxfp4", CLAMPED, (64, 64), 4, 3, True),
    "without gate": ("w4a16-asym-g64", RELU2, (64, 192), 3, 2, False),
    "gelu": (None, GEGLU, (64, 64), 3, 1, False),
}
# slots of the tokens, and the ranks of gate, up and down in each slot
ROWS = {
    "one token": ([0], [(8, 8, 8)]),
    "mixed": ([1, -1, 0, 1, -1], [(3, 16, 5), (4, 0, 20)]),
    "more slots than pairs of a tile": ([18, 2, 2, -1, 18], [(2, 2, 2)] * 19),
    "sorted": ([0, 1, -1] * 14, [(4, 4, 4), (1, 7, 0)]),
    "sorted, of one adapter": ([0] * 40, [(17, 2, 33)]),
}


def make(case, ranks, half, device):
    scheme, kind, (hidden, inner), E, k, bias = CASES[case]
    parsed = None if scheme is None else Scheme.parse(scheme)
    weights = make_experts(parsed, hidden, inner, E, k, kind, bias, half)
    first = [each[:2] if kind.gated else each[:1] for each in ranks]
    sizes, max_rank = (inner,) * len(first[0]), max(map(max, ranks)) + 1
    gate_up = expert_lora(first, E, hidden, sizes, half, device, max_rank=max_rank, seed=1)
    last = [each[2:] for each in ranks]
    down = expert_lora(last, E, inner, (hidden,), half, device, max_rank=max_rank, seed=2)
    return weights, gate_up, down


def tokens(weights, M, hidden, half, device, *, here=None):
    """Random tokens and routes; experts from `here` on are on another rank."""
    E = len(weights.down)
    generator = torch.Generator().manual_seed(M)
    x = torch.randn(M, hidden, generator=generator).to(device, half)
    logits = torch.randn(M, E, generator=generator)
    routes = reference.route(logits, Routing(num_experts=E, top_k=weights.top_k, normalized=True))
    ids = routes.ids_Mk if here is None else routes.ids_Mk.clamp(max=here)
    return x, Routes(ids.to(device), routes.weights_Mk.to(device))


def expected(weights, gate_up, down, x, routes, slots):
    """Each token's sum over its merged experts, in float64."""
    rows, E = [], len(weights.down)
    merged = {slot: merged_experts(weights, gate_up, down, slot) for slot in set(slots)}
    for m, slot in enumerate(slots):
        own, total = merged[slot], 0
        for expert, share in zip(*(each[m].tolist() for each in routes), strict=True):
            if expert >= E:
                continue
            hidden = own.gate_up[expert] @ x[m].cpu().double()
            if own.gate_up_bias_EN is not None:
                hidden = hidden + own.gate_up_bias_EN[expert]
            out = own.down[expert] @ glu(hidden, own.glu)
            if own.down_bias_EN is not None:
                out = out + own.down_bias_EN[expert]
            total = total + share * out
        rows.append(total if isinstance(total, torch.Tensor) else torch.zeros_like(x[m].double()))
    return torch.stack([row.cpu() for row in rows])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_experts_with_adapters(device, half, poison, assert_close, case, rows):
    slots, ranks = ROWS[rows]
    weights, gate_up, down = make(case, ranks, half, device)
    x, routes = tokens(weights, len(slots), CASES[case][2][0], half, device)
    prepared = ops.prepare_experts(weights, half, device, kernel="triton")
    slots_M = torch.tensor(slots, dtype=torch.int32, device=device)
    adapters = ExpertAdapters(gate_up=gate_up, down=down, slots_M=slots_M)
    got = ops.experts(x, routes, prepared, adapters=adapters)
    want = expected(weights, gate_up, down, x, routes, slots)
    assert_close(case, want, got, 4e-3 * COARSER[half])


@pytest.mark.parametrize("M", [3, 40])
@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", None], ids=str)
@pytest.mark.parametrize("kind", [SILU, RELU2, CLAMPED], ids=["silu", "relu2", "clamped"])
def test_tokens_without_adapter_keep_their_bits(device, half, poison, kind, scheme, M):
    """In a fixed order they equal those of a step without adapters, whatever the others have."""
    parsed = None if scheme is None else Scheme.parse(scheme)
    weights = make_experts(parsed, 64, 64, 4, 2, kind, True, half)
    S = 2 if kind.gated else 1
    gate_up = expert_lora([(4,) * S], 4, 64, (64,) * S, half, device, max_rank=4)
    down = expert_lora([(4,)], 4, 64, (64,), half, device, max_rank=4)
    x, routes = tokens(weights, M, 64, half, device)
    prepared = ops.prepare_experts(weights, half, device, kernel="triton")
    slots_M = torch.full((M,), -1, dtype=torch.int32, device=device)
    slots_M[::3] = 0
    adapters = ExpertAdapters(gate_up=gate_up, down=down, slots_M=slots_M)
    got = ops.experts(x, routes, prepared, adapters=adapters)
    from qkernels.moe.triton_experts import plan

    fixed = plan(replace(prepared.problem, requested="fixed_order"), M)
    plain = ops.experts(x, routes, prepared, fixed)
    assert torch.equal(got[slots_M < 0], plain[slots_M < 0])
    assert not torch.equal(got[slots_M == 0], plain[slots_M == 0])


@pytest.mark.parametrize("M", [3, 40])
def test_experts_of_other_ranks_add_nothing(device, half, poison, assert_close, M):
    weights, gate_up, down = make("float", [(3, 3, 3)], half, device)
    here = replace(weights, gate_up=weights.gate_up[:3], down=weights.down[:3], routed_experts=5)
    gate_up, down = (
        replace(each, a_LRESK=each.a_LRESK[:, :, :3], b_LREN=each.b_LREN[:, :, :3])
        for each in (gate_up, down)
    )
    x, routes = tokens(weights, M, 64, half, device, here=3)
    prepared = ops.prepare_experts(here, half, device, kernel="triton")
    slots_M = torch.zeros(M, dtype=torch.int32, device=device)
    adapters = ExpertAdapters(gate_up=gate_up, down=down, slots_M=slots_M)
    got = ops.experts(x, routes, prepared, adapters=adapters)
    want = expected(here, gate_up, down, x, routes, [0] * M)
    assert_close("other ranks", want, got, 4e-3 * COARSER[half])
