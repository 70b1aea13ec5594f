"""Random experts of a layer, and a run of their kernels, for tests."""

import torch

from formats.in_memory.weights import round_to_nearest, with_activation
from formats.scheme import Scheme
from qkernels import ops, reference
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
