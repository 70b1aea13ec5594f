"""Measure sums over GPUs: this package's all-reduce, NCCL's, and torch's symmetric memory.

    python examples/measure_all_reduce.py --ranks 2 --json all_reduce.json

1. Correctness: sums in a CUDA graph with changing inputs must equal plain torch bit by bit. The
   kernel with the norm is compared with plain torch, and must be bit-identical on all ranks. A
   wrong result ends the run before anything is timed.
2. Time of all-reduce + residual + norm of M x 8192 bfloat16 in us: in one kernel, in two kernels,
   and with NCCL and a norm.
3. Time of an all-reduce of 8 KB to 32 MB in us: one shot, two shots, NCCL, symmetric memory.

A time is that of one call in a CUDA graph with a chain of calls, after an untimed replay.
The run ends after --seconds. Waits in kernels are bounded, and the error names the missing rank.
Without a GPU, `--tiny` runs everything in Triton's interpreter, without times.
"""

import argparse
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Multicast is off in all three: not every host has it, and none of these needs it.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
KIB, MIB = 2**10, 2**20
SIZES = tuple(8 * KIB * 2**i for i in range(13))
CHANNELS = 8192
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
SPIN_LIMIT = 2**24  # polls of a waiting block: 10 s or more, because a rank may still compile
ROUNDS = 7


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150, help="time limit of the whole run")
    parser.add_argument("--json", type=Path, help="write the results here, after each part")
    parser.add_argument("--check", action="store_true", help="check results, measure no times")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU; with --check")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Start the ranks, and end all of them when one fails or the time limit is reached."""
    args = parse()
    if args.rank is not None:
        Measurement(args).run()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ENVIRONMENT
        if args.tiny:
            environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment) for rank in range(args.ranks)
        ]
        try:
            return supervise(ranks, time.monotonic() + args.seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def supervise(ranks: list[subprocess.Popen], deadline: float) -> int:
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes):
            if code:
                # the others may be about to say why they failed, too
                time.sleep(2)
                print(f"rank {number} ended with {code}", file=sys.stderr)
                return 1
        if all(code == 0 for code in codes):
            return 0
        if time.monotonic() > deadline:
            late = [number for number, code in enumerate(codes) if code is None]
            print(f"time is up; ranks that still run: {late}", file=sys.stderr)
            return 1
        time.sleep(0.05)


class Measurement:
    """Run one rank: check, then measure."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        self.args, self.rank, self.ranks = args, args.rank, args.ranks
        self.on_gpu = not args.tiny
        index = 0 if args.one_gpu else self.rank
        self.device = torch.device("cuda", index) if self.on_gpu else torch.device("cpu")
        # the interpreter has no bfloat16
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float16
        self.channels = CHANNELS if self.on_gpu else 2176
        self.rows = ROWS if self.on_gpu else (1, 7)
        self.sizes = SIZES if self.on_gpu else (8 * KIB, 64 * KIB)
        if self.on_gpu:
            if torch.cuda.device_count() <= index:
                raise SystemExit(f"{self.ranks} GPUs needed, found {torch.cuda.device_count()}")
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "gloo" if args.tiny or args.check else "cpu:gloo,cuda:nccl",
            init_method=f"file://{args.folder}/store",
            rank=self.rank,
            world_size=self.ranks,
            timeout=datetime.timedelta(seconds=60),
        )
        self.control = dist.new_group(backend="gloo")
        self.results: dict[str, object] = {"ranks": self.ranks, "torch": torch.__version__}
        if self.on_gpu:
            self.results["gpu"] = torch.cuda.get_device_name(self.device)
        self.peers = None

    def run(self) -> None:
        self.say(f"{self.results}")
        self.open_peers()
        if self.peers is None and self.args.check:
            self.expect(False, "no peer memory")
        if self.peers is not None:
            self.part("check", self.check)
        if not self.args.check:
            self.measure()
        # groups are not destroyed: a rank that still waits must not block the others
        sys.stdout.flush()
        os._exit(0)

    def measure(self) -> None:
        if self.peers is not None:
            self.part("norm", self.norms)
            self.part("ours", self.ours)
        self.part("nccl", self.nccl, required=False)
        if self.on_gpu:
            self.part("symmetric", self.symmetric, required=False)
        self.table()

    def part(self, name: str, work: Callable[[], None], required: bool = True) -> None:
        started = time.monotonic()
        try:
            work()
        except (ImportError, AttributeError, RuntimeError, ValueError) as error:
            if required:
                raise
            self.results[name] = " ".join(str(error).split())[:300]
            self.say(f"{name}: {self.results[name]}")
        self.say(f"-- {name}: {time.monotonic() - started:.1f} s")
        self.write()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def write(self) -> None:
        if self.rank == 0 and self.args.json is not None:
            self.args.json.write_text(json.dumps(self.results, indent=1))

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.control)

    def open_peers(self) -> None:
        from qkernels.collective import cuda_ipc, symmetric_memory
        from qkernels.collective.channels import PeerLayout, Peers
        from qkernels.collective.config import Limits
        from qkernels.collective.peer_memory import PeerAccessError, exchange_by, shared_files

        most = max(self.sizes)
        limits = Limits(one_shot=most, two_shot=most, rows=max(self.rows))
        layout = PeerLayout.of_model(self.ranks, self.channels, limits)
        exchange = exchange_by(self.control)
        place = self.rank, layout.num_bytes, self.device, exchange
        import torch.distributed as dist

        ways = {
            "cuda_ipc": lambda: cuda_ipc.open_peer_memory(*place),
            "symmetric_memory": lambda: symmetric_memory.open_peer_memory(*place, dist.group.WORLD),
        }
        if not self.on_gpu:
            folder = self.args.folder
            ways = {"files": lambda: shared_files(self.rank, layout.num_bytes, folder, exchange)}
        for name, open_memory in ways.items():
            try:
                memory = open_memory()
            except PeerAccessError as error:
                self.say(f"{name}: {error}")
                self.results[name] = str(error)
                continue
            self.say(f"peer memory by {name}, {layout.num_bytes / MIB:.0f} MiB a rank")
            self.results["peer_memory"] = name
            self.peers = Peers(memory, layout, SPIN_LIMIT)
            return

    def share(self, rank: int, count: int, seed: int = 0):
        """Return the input of a rank. Every rank can compute all inputs, and the expected sum."""
        import torch

        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randn(count, generator=generator).to(self.dtype).to(self.device)

    def capture(self, calls: Callable[[], None]) -> Callable[[], None]:
        """Capture `calls` in a CUDA graph after two warm-up runs; on a CPU return `calls`."""
        import torch

        calls()
        calls()
        self.wait()
        if not self.on_gpu:
            return calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            calls()
        return graph.replay

    def wait(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        if self.peers is not None:
            self.peers.check()

    def check(self) -> None:
        """Raise an error unless sums in a graph are right, for even and odd sizes."""
        import torch

        from qkernels import reference as plain
        from qkernels.collective import ops, reference
        from qkernels.rowwise.spec import NormSpec

        most = max(self.sizes) // self.dtype.itemsize
        for how in ("one_shot", "two_shot"):
            for count in (1, 1001, 8192, 65537, 3 * MIB):
                if count > most:
                    continue
                x = self.share(self.rank, count)
                out = torch.empty_like(x)

                def calls(x=x, out=out, how=how):
                    once = ops.all_reduce(x, self.peers, how)
                    out.copy_(ops.all_reduce(once, self.peers, how))

                replay = self.capture(calls)
                for seed in range(1, 5 if self.on_gpu else 2):
                    shares = [self.share(rank, count, seed) for rank in range(self.ranks)]
                    x.copy_(shares[self.rank])
                    replay()
                    self.wait()
                    once = reference.all_reduce(shares)
                    want = reference.all_reduce([once] * self.ranks)
                    self.expect(torch.equal(out, want), f"{how} of {count}, seed {seed}")
        for rows in self.rows:
            count = rows * self.channels
            shape = rows, self.channels
            x, residual = (self.share(rank, count).view(shape) for rank in (self.rank, 99))
            spec = NormSpec(weight_C=self.share(98, self.channels), eps=1e-5)
            normed, total = torch.empty_like(x), torch.empty_like(x)

            def calls(x=x, residual=residual, spec=spec, normed=normed, total=total):
                first = ops.all_reduce_norm(x, residual, spec, self.peers)
                normed.copy_(first[0])
                total.copy_(first[1])

            replay = self.capture(calls)
            for seed in range(1, 5 if self.on_gpu else 2):
                shares = [self.share(r, count, seed).view(shape) for r in range(self.ranks)]
                x.copy_(shares[self.rank])
                replay()
                self.wait()
                summed = reference.all_reduce(shares)
                want, want_total = plain.norm(summed, residual, spec)
                self.expect(torch.equal(total, want_total), f"sum of {rows} rows, seed {seed}")
                error = (normed.float() - want.float()).abs().max() / want.float().abs().max()
                self.expect(float(error) < 1e-2, f"norm of {rows} rows, seed {seed}: {error}")
                self.expect(self.same(normed), f"norm of {rows} rows differs over ranks")
        self.say("sums and norms are right, and bitwise equal on all ranks")

    def same(self, x) -> bool:
        """Return True if all ranks have the same bits."""
        import torch.distributed as dist

        own = x.cpu().view(-1)
        found = [own.clone() for _ in range(self.ranks)]
        dist.all_gather(found, own, group=self.control)
        return all(each.equal(own) for each in found)

    def expect(self, right: bool, what: str) -> None:
        if not right:
            print(f"rank {self.rank}: WRONG: {what}", flush=True)
            os._exit(1)

    def microseconds(self, call: Callable[[object], object], x, calls: int) -> float:
        """Time of one call within a chain of calls in a graph."""
        import torch

        if not self.on_gpu:
            call(x)
            self.wait()
            return float("nan")

        def chain() -> None:
            y = x
            for _ in range(calls):
                y = call(y)

        replay = self.capture(chain)
        times = []
        for _ in range(ROUNDS):
            self.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay()  # the ranks meet here
            start.record()
            replay()
            end.record()
            self.wait()
            times.append(start.elapsed_time(end) * 1000 / calls)
        return statistics.median(times)

    def record(self, part: str, key: object, name: str, time_us: float) -> None:
        self.results.setdefault(part, {}).setdefault(str(key), {})[name] = round(time_us, 2)
        self.say(f"{part} {key} {name}: {time_us:.2f} us")

    def norms(self) -> None:
        """Measure the sum over ranks, residual addition and norm of M rows, as in a layer."""
        import torch.distributed as dist

        from formats.scheme import ActivationSpec
        from qkernels import ops as rowwise
        from qkernels.collective import ops
        from qkernels.operands.codes import InputRounding
        from qkernels.operands.limbs import LimbForm
        from qkernels.operands.split_k import SplitKPartials
        from qkernels.rowwise.spec import NormSpec

        codes = InputRounding(ActivationSpec(), None)
        spec = NormSpec(weight_C=self.share(98, self.channels) * 0 + 1, eps=1e-5)
        for rows in self.rows:
            x = self.share(self.rank, rows * self.channels).view(rows, self.channels)
            residual = self.share(99, rows * self.channels).view_as(x)
            parts = SplitKPartials(parts=x.float().expand(4, *x.shape).contiguous(), dtype=x.dtype)
            fused = functools.partial(
                ops.all_reduce_norm, residual_MC=residual, spec=spec, peers=self.peers
            )

            def apart(y, residual=residual):
                summed = ops.all_reduce(y, self.peers)
                return rowwise.norm(summed, residual, spec)[0]

            def by_nccl(y, residual=residual):
                dist.all_reduce(y)
                return rowwise.norm(y, residual, spec)[0]

            def kept(y, form, fused=fused):
                fused(y, out=form)
                return y

            ways = {
                "one kernel": lambda y, fused=fused: fused(y)[0],
                "int8 codes": functools.partial(kept, form=codes),
                "apart": apart,
            }
            if rows <= 4:
                ways["limbs"] = functools.partial(kept, form=LimbForm(bits=4))
            for name, call in ways.items():
                self.record("norm", rows, name, self.microseconds(call, x, 80))
            if rows <= 64:
                call = functools.partial(kept, form=None)
                time_us = self.microseconds(call, parts, 80)
                self.record("norm", rows, "of 4 split-K sums", time_us)
            if self.on_gpu:
                self.record("norm", rows, "NCCL", self.microseconds(by_nccl, x.clone(), 80))

    def per_size(self, name: str, call_of: Callable[[int], Callable | None]) -> None:
        for size in self.sizes:
            call = call_of(size)
            if call is not None:
                x = self.share(self.rank, size // self.dtype.itemsize) * 1e-3
                calls = 100 if size <= MIB else 20
                self.record("size", size // KIB, name, self.microseconds(call, x, calls))

    def ours(self) -> None:
        from qkernels.collective import ops

        for how in ("one_shot", "two_shot"):
            self.per_size(how, lambda size, how=how: lambda x: ops.all_reduce(x, self.peers, how))

    def nccl(self) -> None:
        import torch.distributed as dist

        def call(x):
            dist.all_reduce(x)
            return x

        self.per_size("nccl", lambda size: call)

    def symmetric(self) -> None:
        """Measure torch's symmetric-memory all-reduce, in place on a buffer that has the input."""
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD.group_name
        buffer = symmetric.empty(max(self.sizes) // 2, dtype=self.dtype, device=self.device)
        symmetric.rendezvous(buffer, group)
        buffer.zero_()
        operations = torch.ops.symm_mem

        def one_shot(size: int) -> Callable:
            own = buffer[: size // 2]

            def call(x):
                operations.one_shot_all_reduce(own, "sum", group)
                return x

            return call

        def two_shot(size: int) -> Callable:
            own = buffer[: size // 2]

            def call(x):
                operations.two_shot_all_reduce_(own, "sum", group)
                return x

            return call

        self.per_size("torch one_shot", one_shot)
        self.per_size("torch two_shot", two_shot)

    def table(self) -> None:
        for part, unit in (("norm", "rows"), ("size", "KiB")):
            found = self.results.get(part, {})
            names = list(dict.fromkeys(name for of in found.values() for name in of))
            self.say(f"\n| {unit} | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
            for key, of in found.items():
                cells = " | ".join(f"{of[name]:.2f}" if name in of else "" for name in names)
                self.say(f"| {key} | {cells} |")
        self.write()


if __name__ == "__main__":
    sys.exit(main())
