"""Random experts of a layer, and a run of their kernels, for tests."""

from dataclasses import replace

import torch

from formats.in_memory.weights import round_to_nearest, with_activation
from formats.scheme import Scheme
from qkernels import ops, reference
from qkernels.lora.weights import TABLE_COLUMNS
from qkernels.moe.adapted.weights import ExpertLora
from qkernels.moe.experts import ExpertWeights, shape_of
from qkernels.moe.routing import Glu, Routing

# errors against those in float16
COARSER = {torch.float16: 1, torch.bfloat16: 6}


def make_experts(
    scheme: Scheme | None,
    hidden: int,
    inner: int,
    E: int,
    k: int,
    glu: Glu,
    bias: bool,
    dtype: torch.dtype,
    seed: int = 0,
) -> ExpertWeights:
    """`scheme`: of the rounded weights; None: float."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(N, K, number):
        weight = torch.randn(N, K, generator=generator) * K**-0.5
        if scheme is None:
            return weight.to(dtype)
        rounded = round_to_nearest(weight, scheme.weight, f"expert {number}")
        if scheme.activation is None:
            return rounded
        static = None if scheme.activation.dynamic else 0.03
        return with_activation(rounded, scheme, static)

    return ExpertWeights(
        top_k=k,
        gate_up=[matrix(glu.outputs(inner), hidden, e) for e in range(E)],
        down=[matrix(hidden, inner, e) for e in range(E)],
        gate_up_bias_EN=torch.randn(E, glu.outputs(inner), generator=generator) if bias else None,
        down_bias_EN=torch.randn(E, hidden, generator=generator) if bias else None,
        glu=glu,
    )


def run(weights, M, dtype, device, plan=None, shared=False):
    """(the kernels' sum, plain torch's) of random tokens and routes."""
    E, (hidden, _) = len(weights.down), shape_of(weights.down[0])
    generator = torch.Generator().manual_seed(M)
    x = torch.randn(M, hidden, generator=generator).to(device, dtype)
    logits = torch.randn(M, E, generator=generator).to(device)
    routes = reference.route(logits, Routing(num_experts=E, top_k=weights.top_k, normalized=True))
    extra = torch.randn(M, hidden, generator=generator).to(device, dtype) if shared else None
    prepared = ops.prepare_experts(weights, dtype, device, kernel="triton")
    assert prepared.problem.kernel == "triton"
    got = ops.experts(x, routes, prepared, plan, extra)
    plain = reference.prepare_experts(weights, dtype, device)
    return got, reference.experts(x, routes, plain, None, extra)


def expert_lora(ranks, E, K, sizes, dtype, device, *, max_rank, seed=0):
    """Adapters of one product of E experts. `ranks`: of each slot one for each of `sizes`.

    As on the device, rank j of all experts is adjacent. Elements beyond the ranks are NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    L, S, N = len(ranks), len(sizes), sum(sizes)
    piece = E * S * K + E * N + 16
    memory = torch.randn(L, max_rank, piece, generator=generator) / K**0.5
    table = torch.zeros(L, TABLE_COLUMNS, dtype=torch.int32)
    scales = torch.zeros(L, TABLE_COLUMNS)

    def views(memory):
        slot = (max_rank * piece, piece)
        a_LRESK = memory.as_strided((L, max_rank, E, S, K), (*slot, S * K, K, 1))
        return a_LRESK, memory.as_strided((L, max_rank, E, N), (*slot, N, 1), E * S * K)

    a_LRESK, b_LREN = views(memory)
    for slot, of_slices in enumerate(ranks):
        for s, rank in enumerate(of_slices):
            table[slot, s], scales[slot, s] = rank, 0.5 + slot + s
            a_LRESK[slot, rank:, :, s] = float("nan")
            b_LREN[slot, rank:, :, sum(sizes[:s]) : sum(sizes[: s + 1])] = float("nan")
    a_LRESK, b_LREN = views(memory.to(device, dtype))
    return ExpertLora(
        a_LRESK=a_LRESK,
        b_LREN=b_LREN,
        ranks_LS=table.to(device),
        scales_LS=scales.to(device),
        sizes=tuple(sizes),
    )


def merged_experts(weights: ExpertWeights, gate_up, down, slot: int) -> ExpertWeights:
    """Float64 experts with the adapter of a slot in their weights. Slot -1: without one."""

    def dense(matrix):
        return matrix.double() if isinstance(matrix, torch.Tensor) else matrix.dequantize().double()

    def delta(lora, e):
        parts, start = [], 0
        for s, size in enumerate(lora.sizes):
            rank = int(lora.ranks_LS[slot, s])
            a = lora.a_LRESK[slot, :rank, e, s].cpu().double()
            b = lora.b_LREN[slot, :rank, e, start : start + size].cpu().double()
            parts.append(float(lora.scales_LS[slot, s]) * b.T @ a)
            start += size
        return torch.cat(parts)

    found = {}
    for name, lora in (("gate_up", gate_up), ("down", down)):
        matrices = [dense(each) for each in getattr(weights, name)]
        if slot >= 0:
            matrices = [w + delta(lora, e) for e, w in enumerate(matrices)]
        found[name] = matrices
        bias = getattr(weights, f"{name}_bias_EN")
        found[f"{name}_bias_EN"] = None if bias is None else bias.double()
    return replace(weights, **found)
