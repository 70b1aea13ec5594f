"""Measure a layer of experts on one GPU, in the form that a rank of several would compute.

    python examples/measure_expert_shards.py --shape qwen3-30b --ranks 2 --tokens 1 8 32 128 1024

The same layer (router, experts in 4 bits, norm) with random weights is measured in three forms:
whole; on a tensor-parallel rank (a slice of each expert); and on an expert-parallel rank (some
experts, whole). The sum over ranks is not included. Each time is the median over replays of a CUDA
graph with 16 different inputs, which choose different experts.
"""

import argparse
import json
import statistics

import torch
from bench_shapes import check_device

from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.scheme import Scheme
from qkernels import ops
from qkernels.moe.adapted.weights import ExpertAdapters
from qkernels.moe.experts import ExpertWeights, PreparedExperts
from qkernels.moe.routing import SILU, Routing

MXFP4 = "w4a16-mxfp4"
INPUTS = 16  # different inputs in a graph
# hidden size, inner size, experts, experts of a token
SHAPES = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),  # MXFP4; the others in W4A16
    "mixtral": (4096, 14336, 8, 2),
}


def matrix(N: int, K: int, scheme: str) -> Weight:
    """Random codes on the GPU."""
    spec = Scheme.parse(scheme).weight
    if scheme == MXFP4:
        return Fp4Weight.from_float(torch.randn(N, K, device="cuda") * 0.02, spec, "experts")
    group = spec.group_size
    return PackedWeight(
        words_NW=torch.randint(-(2**31), 2**31, (N, K // 8), dtype=torch.int32, device="cuda"),
        scales_NG=torch.full((N, K // group), 0.01, dtype=torch.float16, device="cuda"),
        zeros_NG=torch.full((N, K // group), 8, dtype=torch.uint8, device="cuda"),
        spec=spec,
        in_features=K,
    )


def layer(hidden: int, inner: int, here: int, routed: int, k: int, scheme: str):
    weights = ExpertWeights(
        top_k=k,
        gate_up=[matrix(2 * inner, hidden, scheme) for _ in range(here)],
        down=[matrix(hidden, inner, scheme) for _ in range(here)],
        glu=SILU,
        routed_experts=routed,
    )
    return ops.prepare_experts(weights, torch.bfloat16, "cuda")


def median_us(
    prepared: PreparedExperts,
    routing: Routing,
    M: int,
    hidden: int,
    repeats: int,
    *,
    numbers_E: torch.Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> float:
    """Return the microseconds of router, experts and norm for M random tokens.

    `numbers_E`: this rank's numbers of the experts. `adapters`: those of the tokens.
    """
    C, E = hidden, routing.num_experts
    router_EC = torch.randn(E, C, device="cuda", dtype=torch.bfloat16) * C**-0.5
    spec = ops.NormSpec(weight_C=torch.ones(C, device="cuda", dtype=torch.bfloat16), eps=1e-6)
    xs = [torch.randn(M, C, device="cuda", dtype=torch.bfloat16) for _ in range(INPUTS)]
    residual = torch.zeros(M, C, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for x in xs:
            routes = ops.route_tokens(x, router_EC, routing, numbers_E=numbers_E)
            ops.norm(ops.experts(x, routes, prepared, adapters=adapters), residual, spec)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(xs))
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["qwen3-30b"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 1024])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    check_device("cuda", "the kernels that it measures need one")
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for shape in arguments.shape:
        hidden, inner, E, k = SHAPES[shape]
        here = E // arguments.ranks
        slice_width = inner // arguments.ranks
        group = next(g for g in (128, 64, 32) if slice_width % g == 0 and hidden % g == 0)
        scheme = MXFP4 if shape == "gpt-oss-120b" else f"w4a16-sym-g{group}"
        routing = Routing(num_experts=E, top_k=k, normalized=True)
        numbers_E = torch.full((E,), here, dtype=torch.int32, device="cuda")
        numbers_E[:here] = torch.arange(here, dtype=torch.int32, device="cuda")
        forms = {
            "whole": (layer(hidden, inner, E, E, k, scheme), None),
            "slices": (layer(hidden, slice_width, E, E, k, scheme), None),
            "experts": (layer(hidden, inner, here, E, k, scheme), numbers_E),
        }
        for M in arguments.tokens:
            found = {
                f"{name}_us": round(
                    median_us(prepared, routing, M, hidden, arguments.repeats, numbers_E=numbers),
                    1,
                )
                for name, (prepared, numbers) in forms.items()
            }
            plan = ops.plan_experts(forms["experts"][0], M)
            print(
                json.dumps({"shape": shape, "tokens": M, **found, "variant": plan.variant}),
                flush=True,
            )


if __name__ == "__main__":
    main()
