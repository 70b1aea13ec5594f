"""Measure attention over paged latents (DeepSeek-V2, V3, GLM-4.7-Flash).

    python examples/measure_latent_attention.py --json latent.json

Each line is for one number of heads and one step. It has the largest difference from plain torch in
float32, the time, and the time to read each entry once at --gb-per-s. Entries are 576 random
numbers per token, in shuffled pages of bfloat16 or int8. Chunks of one request are also computed
over expanded keys and values, with the sizes of DeepSeek-V2-Lite (16 heads) or GLM-4.7-Flash (20);
both times include the products before and after attention. On a GPU, CUDA graphs are replayed.

    python examples/measure_latent_attention.py --kernel triton sm90_decode --only decode

compares kernels in one run; a kernel that does not support 8-bit entries is measured without them.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from qkernels import ops
from qkernels.attention.cache import AttentionStep
from qkernels.latent.cache import PagedLatents
from qkernels.latent.expanded import ExpandedChunks
from qkernels.latent.reference import latent_attention as reference
from qkernels.latent.rows import SM90_DECODE

LATENT, ENTRY, PAGE = 512, 576, 16
SCALE = 0.05
# requests, new tokens of each, keys of each
DECODES = ((128, 1, 4096), (8, 1, 4096), (1, 1, 8192), (32, 4, 4096))
CHUNKS = tuple(
    (1, count, keys) for keys in (2048, 8192) for count in (16, 32, 64, 128, 256, 512, 2048)
)
STEPS = DECODES + CHUNKS
TINY_STEPS = ((2, 1, 40), (1, 3, 20))
KEY_AND_VALUE = {16: (128, 128), 20: (192, 256)}  # P and V by heads


def make_step(requests: int, count: int, keys: int, device: str) -> AttentionStep:
    """Make a step of requests of equal lengths, with shuffled pages."""
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
    """Return the mean time of a call."""
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


def make_cache(num_pages: int, coded: bool, device: str) -> PagedLatents:
    if not coded:
        return PagedLatents(pages=torch.randn(num_pages, PAGE, ENTRY, device=device).bfloat16())
    codes = torch.randint(-127, 128, (num_pages, PAGE, ENTRY), device=device).to(torch.int8)
    scales = torch.rand(num_pages, PAGE, 2, device=device) / 40
    return PagedLatents(pages=codes, scales=scales)


def measure(
    heads: int,
    shape: tuple[int, int, int],
    coded: bool,
    kernel: str | None,
    args: argparse.Namespace,
) -> dict:
    requests, count, keys = shape
    step = make_step(*shape, args.device)
    cache = make_cache(step.block_tables_RX.numel(), coded, args.device)
    q_THE = torch.randn(requests * count, heads, ENTRY, device=args.device).bfloat16()

    def run() -> torch.Tensor:
        return ops.latent_attention(
            q_THE, cache, step, latent_width=LATENT, scale=SCALE, kernel=kernel
        )

    every = torch.arange(len(cache.pages), device=args.device)
    exact = PagedLatents(pages=cache.entries(every, LATENT, torch.float32))
    want = reference(q_THE.float(), exact, step, latent_width=LATENT, scale=SCALE)
    difference = (run().float() - want).abs().max().item()
    found = microseconds(run, args.device, args.repeats)
    of_entry = ENTRY + 8 if coded else 2 * ENTRY
    floor = requests * keys * of_entry / args.gb_per_s / 1e3
    result = {"heads": heads, "requests": requests, "count": count, "keys": keys, "8 bits": coded}
    result |= {"us": found, "floor_us": floor, "difference": difference, "kernel": kernel}
    text = (
        f"{heads} heads, {requests} x {count} tokens of {keys} keys, {cache.pages.dtype}:"
        f" {found:.1f} us, entries read once {floor:.1f} us ({100 * floor / found:.0f} %),"
        f" largest difference {difference:.1e}"
    )
    if kernel is not None:
        text = f"{kernel}, {text}"
    elif requests == 1 and count > 1 and heads in KEY_AND_VALUE:
        result |= both_ways(heads, cache, step, args)
        text += (
            f"; with products {result['absorbed_us']:.1f} us absorbed,"
            f" {result['expanded_us']:.1f} expanded, difference {result['between']:.1e}"
        )
    print(text, flush=True)
    return result


def both_ways(
    heads: int, cache: PagedLatents, step: AttentionStep, args: argparse.Namespace
) -> dict[str, float]:
    """Time a chunk with absorbed queries, and over expanded keys and values."""
    (P, V), count, keys = KEY_AND_VALUE[heads], step.max_query_len, step.max_context_len
    options = {"device": args.device, "dtype": torch.bfloat16}
    key_up_HPL = torch.randn(heads, P, LATENT, **options) / LATENT**0.5
    value_up_HLV = torch.randn(heads, LATENT, V, **options) / LATENT**0.5
    q_NHD = torch.randn(count, heads, P + ENTRY - LATENT, **options)
    size = 64
    index = torch.arange(-(-keys // size) * size // PAGE, device=args.device)
    pages = step.block_tables_RX[0].long()
    chunks = ExpandedChunks(
        rows=slice(0, count),
        pages_X=pages[index.clamp(max=len(pages) - 1)],
        step=AttentionStep(
            block_tables_RX=torch.arange(-(-keys // size), dtype=torch.int32, device=args.device)[
                None
            ],
            query_starts_R1=step.query_starts_R1,
            context_lengths_R=step.context_lengths_R,
            max_query_len=count,
            max_context_len=keys,
        ),
    )

    def absorbed() -> torch.Tensor:
        q_THE = q_NHD.new_empty(count, heads, ENTRY)
        q_THE[..., LATENT:] = q_NHD[..., P:]
        absorbed_HTL = q_THE[..., :LATENT].transpose(0, 1)
        torch.bmm(q_NHD[..., :P].transpose(0, 1), key_up_HPL, out=absorbed_HTL)
        out = ops.latent_attention(q_THE, cache, step, latent_width=LATENT, scale=SCALE)
        return torch.bmm(out.transpose(0, 1), value_up_HLV).transpose(0, 1)

    def expanded() -> torch.Tensor:
        return ops.expanded_latent_attention(
            q_NHD, cache, chunks, key_up_HPL, value_up_HLV, scale=SCALE
        )

    between = (absorbed().float() - expanded().float()).abs().max().item()
    return {
        "absorbed_us": microseconds(absorbed, args.device, args.repeats),
        "expanded_us": microseconds(expanded, args.device, args.repeats),
        "between": between,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 20])
    parser.add_argument("--gb-per-s", type=float, default=3350.0, help="of the card (H100 SXM)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--kernel", nargs="+", default=[None], help="kernels to compare; default: the chosen one"
    )
    parser.add_argument("--only", choices=["decode"], help="decode steps over 16-bit entries")
    parser.add_argument("--tiny", action="store_true", help="steps of a few tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__)
    steps = TINY_STEPS if args.tiny else DECODES if args.only else STEPS
    results = [
        measure(heads, shape, coded, kernel, args)
        for heads in args.heads
        for coded in ((False,) if args.only else (False, True))
        for shape in steps
        for kernel in args.kernel
        if not (coded and kernel == SM90_DECODE)
    ]
    if args.json is not None:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
