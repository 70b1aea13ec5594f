"""Benchmarks of the host time of a call: Python, checks, the choice of a config, and the launch.

Without a CUDA graph, as in a prompt, the host launches some hundred kernels per step; a GPU that
finishes earlier waits for it. The problems here are small, so the GPU always waits.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from formats.in_memory.weights import with_activation
from formats.scheme import CHANNEL, Scheme
from qkernels import ops
from qkernels.bench.linear import random_weight
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case

N, K = 1024, 1024
CALLS = 100  # the driver queues more calls than this before it makes the host wait
REPEATS = 15


def host_time(calls: list[Call]) -> float:
    """Return the microseconds until a call returns, without waiting for the GPU's work."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) * 1e6 / len(calls))
    torch.cuda.synchronize()
    return statistics.median(times)


def _w4a16(x: torch.Tensor) -> tuple[Call, Call, torch.Tensor]:
    return _linear(random_weight(N, K, seed=0), x)


def _w8a8(x: torch.Tensor) -> tuple[Call, Call, torch.Tensor]:
    packed = random_weight(N, K, seed=0, bits=8, group_size=CHANNEL)
    return _linear(with_activation(packed, Scheme.parse("w8a8"), None), x)


def _linear(packed, x: torch.Tensor) -> tuple[Call, Call, torch.Tensor]:
    weight, dense_NK = ops.prepare_weight(packed, x.dtype), packed.dequantize(x.dtype)
    want = x.double() @ packed.dequantize(torch.float64).t()
    return lambda: ops.linear(x, weight), lambda: functional.linear(x, dense_NK), want


def _rms_norm(x: torch.Tensor) -> tuple[Call, Call, torch.Tensor]:
    weight = torch.ones(K, device="cuda", dtype=x.dtype)
    want = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    spec = ops.NormSpec(weight_C=weight, eps=1e-5)
    return (
        lambda: ops.norm(x, None, spec)[0],
        lambda: functional.rms_norm(x, (K,), weight, 1e-5),
        want,
    )


# operation -> function of an input [m, K]: (our call, torch's nearest call, their expected result)
LAUNCHES: dict[str, Callable[[torch.Tensor], tuple[Call, Call, torch.Tensor]]] = {
    "w4a16": _w4a16,
    "w8a8": _w8a8,
    "rms_norm": _rms_norm,
}


def _launch(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        ours, torchs, want = LAUNCHES[shape](x)
        yield Case(
            op="launch",
            shape=shape,
            m=m,
            num_bytes=0,
            operations=0,
            calls=[ours] * CALLS,
            timer=host_time,
            want=want,
            allowed_error=3e-2,  # includes rounding x to int8
            baselines={"torch": [torchs] * CALLS} if "torch" in baselines else {},
        )


OPS: dict[str, BenchedOp] = {
    "launch": BenchedOp(
        cases=_launch,
        shapes=dict.fromkeys(LAUNCHES),
        default_m=dict.fromkeys(LAUNCHES, (1, 128)),
        baselines=("torch",),
    ),
}
