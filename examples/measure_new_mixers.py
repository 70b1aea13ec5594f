"""Measure selected keys (DeepSeek-V3.2), Kimi delta attention and lightning attention.

    python examples/measure_new_mixers.py --json mixers.json

Runs one layer of three models, each in decode steps and in one chunk of a prompt. DeepSeek-V3.2 has
128 heads, an indexer of 64 heads of 128, and 2,048 selected keys per row. Kimi Linear has 32 heads
of 128, MiniMax-Text-01 64 heads of 128. Each line has the measured time, and the time to read and
write the required bytes at --gb-per-s. On a GPU, CUDA graphs are replayed.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench_shapes import check_device
from measure_latent_attention import ENTRY, LATENT, PAGE, make_step, microseconds

from qkernels import ops
from qkernels.causal_conv.state import StateStep
from qkernels.latent.cache import PagedLatents

INDEX_HEADS, INDEX_WIDTH = 64, 128
Case = tuple[str, Callable[[], object], float]  # name, call, bytes


def selected(requests: int, count: int, keys: int, most: int, heads: int, device: str) -> Iterator:
    """Make the cases of key selection, and of attention over selected keys and over all keys."""
    made = {"device": device, "dtype": torch.bfloat16}
    pages = -(-keys // PAGE) * requests
    rows = requests * count
    step = make_step(requests, count, keys, device)
    cache = PagedLatents(pages=torch.randn(pages, PAGE, ENTRY, **made))
    index_keys = torch.randn(pages, PAGE, INDEX_WIDTH, **made)
    q_TID = torch.randn(rows, INDEX_HEADS, INDEX_WIDTH, **made)
    weights_TI = torch.randn(rows, INDEX_HEADS, device=device)
    q_THE = torch.randn(rows, heads, ENTRY, **made)
    attend = {"latent_width": LATENT, "scale": 0.05}
    found = ops.select_keys(q_TID, weights_TI, index_keys, step, most=most)
    name = f"{requests} x {count} rows of {keys} keys"
    yield (
        f"select {most}, {name}",
        lambda: ops.select_keys(q_TID, weights_TI, index_keys, step, most=most),
        requests * keys * INDEX_WIDTH * 2,
    )
    yield (
        f"attend to selected, {heads} heads, {name}",
        lambda: ops.selected_latent_attention(q_THE, cache, found, **attend),
        min(rows * most, requests * keys) * ENTRY * 2,
    )
    yield (
        f"attend to all, {heads} heads, {name}",
        lambda: ops.latent_attention(q_THE, cache, step, **attend),
        requests * keys * ENTRY * 2,
    )


def state_step(requests: int, count: int, device: str) -> StateStep:
    int32 = {"dtype": torch.int32, "device": device}
    return StateStep(
        query_starts_R1=torch.arange(0, requests * count + 1, count, **int32),
        context_lengths_R=torch.full((requests,), 4096 + count, **int32),
        slots_R=torch.arange(requests, **int32),
        max_query_len=count,
    )


def states(requests: int, count: int, heads: int, width: int, device: str) -> Iterator:
    """Make the cases of delta nets (decay per head, per channel) and of lightning attention."""
    made = {"device": device, "dtype": torch.bfloat16}
    rows, inner = requests * count, heads * width
    step = state_step(requests, count, device)
    mixed_TC, b_TH = torch.randn(rows, 3 * inner, **made), torch.randn(rows, heads, **made)
    memory = torch.zeros(requests, heads, width, width, device=device)
    moved = 2 * memory.numel() * 4
    a_log, zeros_H = torch.zeros(heads, device=device), torch.zeros(heads, device=device)
    name = f"{heads} heads, {requests} x {count} rows"
    for kind, decays in (("by head", heads), ("by channel", inner)):
        a_TA, bias = torch.randn(rows, decays, **made), torch.zeros(decays, device=device)
        yield (
            f"delta rule {kind}, {name}",
            lambda a=a_TA, bias=bias: ops.delta_rule_(mixed_TC, b_TH, a, a_log, bias, memory, step),
            moved,
        )
    steps_TH, bias_H = torch.zeros_like(b_TH), torch.full_like(zeros_H, math.log(math.e - 1))
    yield (
        f"lightning attention, {name}",
        lambda: ops.selective_scan_(
            mixed_TC, steps_TH, a_log, zeros_H, bias_H, memory, (0.0, math.inf), step
        ),
        moved,
    )


def cases(args: argparse.Namespace) -> Iterator[Case]:
    if args.tiny:
        yield from selected(2, 1, 40, 8, 16, args.device)
        yield from states(2, 3, 2, 16, args.device)
        return
    for requests, count, keys in ((1, 1, 32768), (32, 1, 32768), (1, 2048, 16384)):
        yield from selected(requests, count, keys, 2048, 128, args.device)
    for heads in (32, 64):
        for requests, count in ((1, 1), (32, 1), (1, 4096)):
            yield from states(requests, count, heads, 128, args.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--gb-per-s", type=float, default=4800.0)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check_device(args.device, "add --device cpu --tiny")
    found = []
    with torch.inference_mode():
        for name, run, moved in cases(args):
            time_us = microseconds(run, args.device, args.repeats)
            floor_us = moved / args.gb_per_s / 1e3
            found.append({"case": name, "us": time_us, "floor_us": floor_us})
            print(f"{name}: {time_us:.1f} us, its bytes {floor_us:.1f} us", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
