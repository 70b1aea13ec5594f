"""Measure a product over two GPUs and the sum of its result: one after the other, and overlapped.

    python examples/measure_overlap.py --json overlap.json

The products are o_proj and down_proj of Llama-3-70B in W4A16, of which each GPU has half of the
inputs. Printed for each number of rows, in us:

- product: the product of one GPU alone;
- sum, copies: the sum over both GPUs alone, by the all-reduce (NCCL for many rows), and by copies
  of all rows at the end;
- in turn: product, all-reduce, residual and norm;
- overlapped: the same with rows that are copied during the product (qserve/parallel/row_chunks.py),
  for several divisions into chunks; the first one is the default.

Results of both are compared first. Times are medians of rounds of several calls, in turn. Without
GPUs, `--device cpu` runs everything with small sizes over gloo, without useful times.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_shapes import check_device

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
CHANNELS = 8192
INPUTS = {"o_proj": 4096, "down_proj": 14336}  # of each GPU
ROWS = (3072, 4096, 8000)
ROUNDS, CALLS = 7, 5
# ends of chunks as fractions of the rows, besides the default's
DIVISIONS = {
    "2 chunks": (0.75,),
    "4 equal chunks": (0.25, 0.5, 0.75),
    "8 equal chunks": tuple(i / 8 for i in range(1, 8)),
    "3 chunks": (0.5, 0.8125),
    "5 chunks": (0.3125, 0.5625, 0.75, 0.9375),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scheme", default="w4a16-sym")
    parser.add_argument("--rows", type=int, nargs="+", help=f"default: {ROWS}")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of the whole run")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Start both ranks, and end them when one fails or the time limit is reached."""
    args = parse()
    if args.rank is not None:
        sys.path[:0] = [str(HERE.parent)]
        measure(args)
        sys.stdout.flush()
        os._exit(0)  # a normal exit would wait for NCCL's threads
    check_device(args.device, "add --device cpu")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        environment = {**ENVIRONMENT, **os.environ}
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
        deadline = time.monotonic() + args.seconds
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                    print("a rank failed, or the time limit was reached")
                    return 1
                time.sleep(0.1)
            return max(rank.returncode for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def measure(args: argparse.Namespace) -> None:
    """Measure as one of the ranks."""
    import torch

    from qkernels import QuantLinear
    from qserve.model.blocks.linear import RowParallel
    from qserve.model.blocks.norm import Norm
    from qserve.parallel import row_chunks
    from qserve.parallel.ranks import join

    torch.set_grad_enabled(False)
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", args.rank) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    channels, products, rows_of = CHANNELS, INPUTS, args.rows or ROWS
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        channels, products, rows_of = 256, {"o_proj": 128}, (64,)
        row_chunks.MIN_ROWS, row_chunks.ALIGNMENT = 64, 4
    communicator = join(
        f"file://{args.folder}/store",
        args.rank,
        tensor_parallel_size=2,
        stages=1,
        device=device,
        hidden_size=channels,
        max_rows=max(rows_of),
        equal_shards=True,
    ).communicator
    norm = Norm(torch.ones(channels, dtype=dtype, device=device), 1e-5)
    default_ends, results = row_chunks.ENDS, {}
    for name, inputs in products.items():
        weight = torch.randn(channels, inputs, device=device) / inputs**0.5
        linear = QuantLinear.from_float(weight.to(dtype), args.scheme)
        layer = RowParallel(linear.prepare(dtype, device, release=True), communicator)
        for rows in rows_of:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            torch.manual_seed(0)
            residual = torch.randn(rows, channels, device=device).to(dtype)
            y, plan = torch.empty_like(residual), layer.plan(rows, "norm")
            if plan.input is not None:
                from qkernels import ops

                x = ops.in_form(x, plan.input)

            def whole(ends: tuple | None, x=x, plan=plan, layer=layer, residual=residual):
                communicator.overlaps = ends is not None
                row_chunks.ENDS = ends or default_ends
                return norm(layer(x, plan), residual, None)

            def copies(y=y):
                communicator.overlaps = True
                row_sum = communicator.begin_sum(y)
                row_sum.send(0, len(y))
                return row_sum.total()

            cases: dict[str, Callable[[], object]] = {
                "product": lambda x=x, plan=plan, layer=layer: layer.inner(x, plan),
                "sum": lambda y=y: communicator.all_reduce(y),
                "copies": copies,
                "in turn": lambda whole=whole: whole(None),
                "overlapped": lambda whole=whole: whole(default_ends),
            } | {
                f"overlapped, {label}": lambda whole=whole, ends=ends: whole(ends)
                for label, ends in DIVISIONS.items()
            }
            want, found = (whole(ends)[1].float() for ends in (None, default_ends))
            error = float((found - want).norm() / want.norm())
            if not error < 1e-2:
                raise SystemExit(f"rank {args.rank}: {name} of {rows} rows differs by {error}")
            times = medians(cases, device)
            results[f"{name} {rows}"] = {**times, "equal bits": torch.equal(found, want)}
            if args.rank == 0:
                print(f"{name}, {rows} rows, us: {results[f'{name} {rows}']}", flush=True)
    if args.rank == 0 and args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    wait(device)


def medians(cases: dict[str, Callable[[], object]], device) -> dict[str, float]:
    """Return the median us of each case over rounds in which all cases run in turn."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(ROUNDS + 1):
        for name, call in cases.items():
            call()
            wait(device)
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            wait(device)
            if turn:  # the first round warms up
                found[name].append(1e6 * (time.perf_counter() - started) / CALLS)
    return {name: round(statistics.median(times), 1) for name, times in found.items()}


def wait(device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
