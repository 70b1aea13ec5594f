"""Measure attention over paged latents (DeepSeek-V2, V3, GLM-4.7-Flash).

    python examples/measure_latent_attention.py --json latent.json

For each number of heads and each step: the largest difference from plain torch in float32, the
time, and the time that reading each entry once takes at --gb-per-s. Entries are random bfloat16 of
576 numbers in shuffled pages. On a GPU the time is that of a CUDA graph's replays.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from qkernels import ops
from qkernels.attention.cache import AttentionStep
from qkernels.latent.cache import PagedLatents
from qkernels.latent.reference import latent_attention as reference

LATENT, ENTRY, PAGE = 512, 576, 16
SCALE = 0.05
# requests, new tokens of each, keys of each
STEPS = ((128, 1, 4096), (8, 1, 4096), (1, 1, 8192), (1, 2048, 2048))
TINY_STEPS = ((2, 1, 40), (1, 3, 20))


def make_step(requests: int, count: int, keys: int, device: str) -> AttentionStep:
    """Requests of equal lengths, whose pages are shuffled."""
    pages = -(-keys // PAGE)
    table = torch.randperm(requests * pages, device=device).to(torch.int32).view(requests, pages)
    int32 = {"dtype": torch.int32, "device": device}
    return AttentionStep(
        block_tables_RX=table,
        query_starts_R1=torch.arange(0, requests * count + 1, count, **int32),
        context_lengths_R=torch.full((requests,), keys, **int32),
        max_query_len=count,
        max_context_len=keys,
    )


def microseconds(run, device: str, repeats: int) -> float:
    """Mean time of a call."""
    run()
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats * 1e3


def measure(heads: int, shape: tuple[int, int, int], args: argparse.Namespace) -> dict:
    requests, count, keys = shape
    step = make_step(*shape, args.device)
    pages = torch.randn(step.block_tables_RX.numel(), PAGE, ENTRY, device=args.device)
    cache = PagedLatents(pages=pages.bfloat16())
    q_THE = torch.randn(requests * count, heads, ENTRY, device=args.device).bfloat16()

    def run() -> torch.Tensor:
        return ops.latent_attention(q_THE, cache, step, latent_width=LATENT, scale=SCALE)

    exact = PagedLatents(pages=cache.pages.float())
    want = reference(q_THE.float(), exact, step, latent_width=LATENT, scale=SCALE)
    difference = (run().float() - want).abs().max().item()
    found = microseconds(run, args.device, args.repeats)
    floor = requests * keys * ENTRY * 2 / args.gb_per_s / 1e3
    result = {"heads": heads, "requests": requests, "count": count, "keys": keys}
    result |= {"us": found, "floor_us": floor, "difference": difference}
    print(
        f"{heads} heads, {requests} x {count} tokens of {keys} keys: {found:.1f} us, entries read"
        f" once {floor:.1f} us, largest difference {difference:.1e}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 20])
    parser.add_argument("--gb-per-s", type=float, default=3350.0, help="of the card (H100 SXM)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="steps of a few tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__)
    steps = TINY_STEPS if args.tiny else STEPS
    results = [measure(heads, shape, args) for heads in args.heads for shape in steps]
    if args.json is not None:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
