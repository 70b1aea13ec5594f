"""Benchmarks of a W4A16 product with the next operation, which may add its split-K partial sums.

Baseline "apart": the same two operations, with the partial sums added before the second.
"""

from collections.abc import Callable, Iterator
from operator import itemgetter

import torch

from qkernels import ops
from qkernels.attention.cache import PagedKv
from qkernels.attention.reference import apply_rope
from qkernels.bench.linear import GROUP, LINEAR_SHAPES, w4a16_weights
from qkernels.bench.measure import (
    Baselines,
    BenchedOp,
    Call,
    Case,
    itself,
    read_shape,
)
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.split_k import Consumer, LinearOutput, split_heads

READ_M = (8, 16, 32, 64)
SMALL_SHAPES = {  # Qwen2.5-0.5B, [N, K]
    "small_qkv": (1152, 896),
    "small_o": (896, 896),
    "small_down": (896, 4864),
}
READ_SHAPES: dict[Consumer, dict[str, tuple[int, int]]] = {
    consumer: {name: (LINEAR_SHAPES | SMALL_SHAPES)[name] for name in names}
    for consumer, names in {
        "rope": ("qkv", "small_qkv"),
        "norm": ("o", "down", "small_o", "small_down"),
    }.items()
}
# outputs [M, N] of the product -> result of the next operation
Read = Callable[[LinearOutput], torch.Tensor | tuple[torch.Tensor, ...]]


def _norm(M: int, N: int) -> tuple[Read, Read]:
    norm = torch.rand(N, device="cuda", dtype=torch.bfloat16) + 0.5
    residual = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)

    def exact(y: torch.Tensor) -> torch.Tensor:
        total = y + residual.double()
        return total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()

    spec = ops.NormSpec(weight_C=norm, eps=1e-5)
    return lambda y: ops.norm(y, residual, spec), exact


def _rope(M: int, N: int) -> tuple[Read, Read]:
    """Return RoPE with KV writes, and its exact form.

    A sixth of the heads are keys, a sixth values.
    """
    D = 128 if N % 128 == 0 and N > 2048 else 64
    J = N // D // 6
    H = N // D - 2 * J
    cos_sin = torch.rand(M, D, device="cuda")
    positions, slots = (torch.arange(M, device="cuda") * step for step in (1, 16))
    k_pages, v_pages = (
        torch.zeros(M, 16, J, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    cache = PagedKv(k_pages=k_pages, v_pages=v_pages)

    def run(y: LinearOutput) -> torch.Tensor:
        heads = split_heads(y, (H, J, J), D)
        return ops.rope_write_kv_(*heads, cos_sin, positions, cache, slots, inputs_ready=True)

    def exact(y: torch.Tensor) -> torch.Tensor:
        q, k, _ = split_heads(y, (H, J, J), D)
        return apply_rope(q, k, cos_sin, positions)[0]

    return run, exact


def _read(
    consumer: Consumer,
    make: Callable[[int, int], tuple[Read, Read]],
    shape: str,
    ms: tuple[int, ...],
    baselines: Baselines,
) -> Iterator[Case]:
    N, K = read_shape(READ_SHAPES[consumer], shape)
    num_bytes = N * K // 2
    weights, weight_NK = w4a16_weights(N, K)

    def call(x: torch.Tensor, weight: PreparedWeight, read: Read, by: Consumer | None) -> Call:
        plan = ops.plan_linear(weight, x.shape[0], by, fused=False)
        return lambda: read(ops.linear(x, weight, None, plan))

    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        run, exact = make(m, N)
        left = ops.plan_linear(weights[0], m, consumer, fused=False).output == "split_k"
        apart = left and "apart" in baselines
        yield Case(
            op=f"w4a16_{consumer}",
            shape=shape,
            m=m,
            num_bytes=num_bytes + 2 * N * K // GROUP + 2 * m * (K + 3 * N),
            operations=2 * m * N * K,
            calls=[call(x, weight, run, consumer) for weight in weights],
            want=exact(x.double() @ weight_NK.t()),
            values=itemgetter(0) if consumer == "norm" else itself,
            allowed_error=8e-3,  # rounded twice
            baselines={"apart": [call(x, w, run, None) for w in weights]} if apart else {},
        )


def _benched(consumer: Consumer, make: Callable[[int, int], tuple[Read, Read]]) -> BenchedOp:
    shapes = READ_SHAPES[consumer]
    return BenchedOp(
        cases=lambda shape, ms, baselines: _read(consumer, make, shape, ms, baselines),
        shapes=shapes,
        default_m=dict.fromkeys(shapes, READ_M),
        baselines=("apart",),
        dims=2 if consumer == "norm" else 0,  # RoPE also needs the number of heads
    )


OPS: dict[str, BenchedOp] = {
    "w4a16_norm": _benched("norm", _norm),
    "w4a16_rope": _benched("rope", _rope),
}
