"""Random experts of a layer, for the tests of their kernels."""

import torch

from formats.in_memory.weights import round_to_nearest, with_activation
from formats.scheme import Scheme
from qkernels.moe.experts import ExpertWeights
from qkernels.moe.routing import Glu


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
