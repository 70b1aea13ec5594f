"""Cycles of sleep, wake, pause and new weights under load, then kills in the middle of them.

    python examples/server_cycles                                     # the bundled model
    python examples/server_cycles --paused-requests refuse --cycles 50 --kills 0

A server gets new weights many times, from a folder and from tensors, while clients send requests.
Two more servers, each started with one set of weights, give the expected tokens. Each reply must
match them, even if an update comes in the middle of the reply. A request without a reply, a wrong
token, or growing memory ends the program with exit status 1. After the cycles, the engine process
is killed in the middle of updates, sleeps and wakes. The server must report this, start the engine
again, and then hold exactly one of the two sets of weights.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from cycles import Cycles
from load import Load
from server import Server, Wrong
from weights import Weights

MODEL = Path(__file__).parents[1] / "models" / "docs-5m"


def run(arguments: argparse.Namespace, server: Server, weights: Weights) -> None:
    refuses = arguments.paused_requests == "refuse"
    load = Load(server, weights, refuses=refuses, clients=arguments.clients)
    cycles, memory = Cycles(load, server, weights, parts=True), []
    try:
        for number in range(1, arguments.cycles + 1):
            cycles.cycle()
            load.check()
            memory.append(server.memory_mib())
            if number % max(1, arguments.cycles // 8) == 0:
                host, device = memory[-1]
                print(f"cycle {number}: engine {host:.0f} MiB, GPU {device:.0f} MiB", flush=True)
        for number in range(arguments.kills):
            print(cycles.kill(arguments.kill_seconds * number / arguments.kills), flush=True)
            load.check()
    finally:
        load.stop()
    load.check()
    print("replies:", ", ".join(f"{count} {kind}" for kind, count in load.counts.items()))
    for message in sorted(load.messages):
        print(f"at a kill: {message}")
    if not load.counts["compared"]:
        raise Wrong("no reply was compared")
    settled = len(memory) // 4
    for name, values in zip(("engine", "GPU"), zip(*memory, strict=True), strict=True):
        growth = max(values[-5:]) - max(values[settled : settled + 5])
        print(f"{name} memory from cycle {settled} to {len(memory)}: {growth:+.1f} MiB")
        if len(memory) >= 100 and growth > arguments.most_growth:
            raise Wrong(f"the {name} memory grew by {growth:.1f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--kill-seconds", type=float, default=0.5, help="largest delay of a kill")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--paused-requests", choices=("wait", "refuse"), default="wait")
    parser.add_argument("--most-growth", type=float, default=24.0, help="of memory, MiB")
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("flags", nargs="*", help="further flags of the servers, after --")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    flags = ["--batch-invariant", "--max-num-seqs", "8", "--quantization", "w4a16"]
    flags += ["--kv-cache-memory", "0.25"] if device == "cuda" else []
    flags += ["--enable-admin-routes", *arguments.flags]
    restarts = ["--restart-engine", str(arguments.kills + 1)]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        weights = Weights(arguments.model, Path(scratch), device, flags)
        stack.callback(weights.close)
        own = ["--paused-requests", arguments.paused_requests, *restarts]
        server = Server([str(arguments.model)], [*flags, *own])
        stack.callback(server.close)
        try:
            run(arguments, server, weights)
        except Wrong as error:
            print(f"wrong: {error}")
            return 1
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"cycles": arguments.cycles, "wrong": 0}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
