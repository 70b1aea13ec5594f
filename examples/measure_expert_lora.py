"""Measure a layer of experts with LoRA adapters on one GPU.

    python examples/measure_expert_lora.py --shape qwen3-30b --tokens 1 8 64 1024

The layer (router, experts in 4 bits, norm) has random weights. It is measured without adapters; in
the kernels of a step with adapters, if no token has one; with one adapter for all tokens; and with
several. First the sum over experts is compared with merged float weights. Each time is the median
over replays of a CUDA graph with 16 different inputs, which choose different experts.
"""

import argparse
import json

import torch
from bench_shapes import check_device
from measure_expert_shards import MXFP4, SHAPES, layer, median_us

from qkernels import ops, reference
from qkernels.lora.weights import TABLE_COLUMNS
from qkernels.moe.adapted.weights import ExpertAdapters, ExpertLora
from qkernels.moe.experts import ExpertWeights
from qkernels.moe.routing import SILU, Routing


def random_lora(E: int, K: int, sizes: tuple[int, ...], slots: int, rank: int) -> ExpertLora:
    S, N = len(sizes), sum(sizes)
    return ExpertLora(
        a_LRESK=torch.randn(slots, rank, E, S, K, device="cuda", dtype=torch.bfloat16) * K**-0.5,
        b_LREN=torch.randn(slots, rank, E, N, device="cuda", dtype=torch.bfloat16) * rank**-0.5,
        ranks_LS=torch.full((slots, TABLE_COLUMNS), rank, dtype=torch.int32, device="cuda"),
        scales_LS=torch.full((slots, TABLE_COLUMNS), 0.5, device="cuda"),
        sizes=sizes,
    )


def random_adapters(E: int, hidden: int, inner: int, slots: int, rank: int) -> ExpertAdapters:
    return ExpertAdapters(
        gate_up=random_lora(E, hidden, (inner, inner), slots, rank),
        down=random_lora(E, inner, (hidden,), slots, rank),
        slots_M=torch.zeros(0, dtype=torch.int32, device="cuda"),
    )


def with_slots(adapters: ExpertAdapters, slots: list[int]) -> ExpertAdapters:
    slots_M = torch.tensor(slots, dtype=torch.int32, device="cuda")
    return ExpertAdapters(gate_up=adapters.gate_up, down=adapters.down, slots_M=slots_M)


def merged(lora: ExpertLora, slot: int, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return float32 weights plus scale * B A of each expert."""
    found = []
    for e, weight in enumerate(weights):
        parts, start = [], 0
        for s, size in enumerate(lora.sizes):
            b_rN = lora.b_LREN[slot, :, e, start : start + size].float()
            parts.append(lora.scales_LS[slot, s] * b_rN.T @ lora.a_LRESK[slot, :, e, s].float())
            start += size
        found.append(weight.float() + torch.cat(parts))
    return found


def relative_error(M: int, num_slots: int) -> float:
    """Return the error of a small float layer against merged weights, in one token of each kind."""
    E, k, hidden, inner = 8, 2, 256, 128
    gate_up = [torch.randn(2 * inner, hidden, device="cuda") / 16 for _ in range(E)]
    down = [torch.randn(hidden, inner, device="cuda") / 11 for _ in range(E)]
    gate_up, down = ([w.bfloat16() for w in each] for each in (gate_up, down))
    weights = ExpertWeights(top_k=k, gate_up=gate_up, down=down, glu=SILU)
    prepared = ops.prepare_experts(weights, torch.bfloat16, "cuda")
    x = torch.randn(M, hidden, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(M, E, device="cuda")
    routes = ops.route(logits, Routing(num_experts=E, top_k=k, normalized=True))
    slots = [m % (num_slots + 1) - 1 for m in range(M)]
    adapters = with_slots(random_adapters(E, hidden, inner, num_slots, 16), slots)
    got = ops.experts(x, routes, prepared, adapters=adapters).float()
    want = torch.zeros_like(got)
    for slot in set(slots):
        own = [gate_up, down]
        if slot >= 0:
            pairs = ((adapters.gate_up, gate_up), (adapters.down, down))
            own = [merged(lora, slot, each) for lora, each in pairs]
        own = [[w.float() for w in each] for each in own]
        whole = ExpertWeights(top_k=k, gate_up=own[0], down=own[1], glu=SILU)
        plain = reference.prepare_experts(whole, torch.float32, torch.device("cuda"))
        rows = torch.tensor([each == slot for each in slots], device="cuda")
        want[rows] = reference.experts(x.float(), routes, plain)[rows]
    return ((got - want).norm() / want.norm()).item()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["qwen3-30b"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-loras", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 1024])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    check_device("cuda", "the kernels that it measures need one")
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    L = arguments.max_loras
    errors = {f"M={M}": relative_error(M, L) for M in (3, 24, 200)}
    print(json.dumps({"relative_errors": errors}))
    assert max(errors.values()) < 0.02, "results differ from those of merged weights"
    for shape in arguments.shape:
        hidden, inner, E, k = SHAPES[shape]
        scheme = MXFP4 if shape == "gpt-oss-120b" else "w4a16-sym-g128"
        prepared = layer(hidden, inner, E, E, k, scheme)
        routing = Routing(num_experts=E, top_k=k, normalized=True)
        adapters = random_adapters(E, hidden, inner, L, arguments.rank)
        for M in arguments.tokens:
            kinds = {
                "without": None,
                "none": with_slots(adapters, [-1] * M),
                "one": with_slots(adapters, [0] * M),
                "several": with_slots(adapters, [m % L for m in range(M)]),
            }
            found = {
                f"{name}_us": round(
                    median_us(prepared, routing, M, hidden, arguments.repeats, adapters=each),
                    1,
                )
                for name, each in kinds.items()
            }
            print(json.dumps({"shape": shape, "tokens": M, **found}), flush=True)


if __name__ == "__main__":
    main()
