"""Benchmarks of a W4A16 product of few rows with the operation before it, which may make its limbs.

Baseline "apart", if the operation makes limbs: the same two operations with a tensor between them.
"""

from collections.abc import Callable, Iterator

import torch

from qkernels import ops
from qkernels.bench.linear import GROUP, LINEAR_SHAPES, w4a16_weights
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.forms import InputForm, LinearInput

FED_M = (1, 2, 4, 8, 16, 32)
FED_SHAPES = {name: LINEAR_SHAPES[name] for name in ("qkv", "gate_up", "down")}
# (rows of K or 2 K inputs, form) -> the product's input, by the operation before it
Feed = Callable[[torch.Tensor, InputForm], LinearInput]


def _norm_w4a16(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    K = FED_SHAPES[shape][1]
    weight_K = torch.rand(K, device="cuda", dtype=torch.bfloat16) + 0.5
    spec = ops.NormSpec(weight_C=weight_K, eps=1e-5)
    residual = torch.randn(max(ms), K, device="cuda", dtype=torch.bfloat16)

    def feed(x_MK: torch.Tensor, form: InputForm) -> LinearInput:
        return ops.norm(x_MK, residual[: x_MK.shape[0]], spec, form)[0]

    yield from _fed("norm_w4a16", shape, ms, baselines, feed, 1)


def _silu_w4a16(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    def feed(x_M2K: torch.Tensor, form: InputForm) -> LinearInput:
        return ops.activate(x_M2K, ops.ActSpec(kind="silu"), form)

    yield from _fed("silu_w4a16", shape, ms, baselines, feed, 2)


def _fed(
    op: str,
    shape: str,
    ms: tuple[int, ...],
    baselines: Baselines,
    feed: Feed,
    widths: int,
) -> Iterator[Case]:
    N, K = FED_SHAPES[shape]
    num_bytes = N * K // 2
    weights, weight_NK = w4a16_weights(N, K)

    def call(x: torch.Tensor, weight: PreparedWeight, form: InputForm) -> Call:
        return lambda: ops.linear(feed(x, form), weight)

    for m in ms:
        x = torch.randn(m, widths * K, device="cuda", dtype=torch.bfloat16)
        form = ops.plan_linear(weights[0], m).input
        apart = form is not None and "apart" in baselines
        yield Case(
            op=op,
            shape=shape,
            m=m,
            num_bytes=num_bytes + 2 * N * K // GROUP + 2 * m * (N + 2 * widths * K),
            operations=2 * m * N * K,
            calls=[call(x, weight, form) for weight in weights],
            want=feed(x, None).double() @ weight_NK.t(),
            allowed_error=5e-3,
            baselines={"apart": [call(x, w, None) for w in weights]} if apart else {},
        )


OPS: dict[str, BenchedOp] = {
    "norm_w4a16": BenchedOp(
        cases=_norm_w4a16,
        shapes={name: FED_SHAPES[name] for name in ("qkv", "gate_up")},
        default_m=dict.fromkeys(("qkv", "gate_up"), FED_M),
        baselines=("apart",),
    ),
    "silu_w4a16": BenchedOp(
        cases=_silu_w4a16,
        shapes={"down": FED_SHAPES["down"]},
        default_m={"down": FED_M},
        baselines=("apart",),
    ),
}
