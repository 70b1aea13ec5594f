"""Measure the output rate of a server with 1, 2, ... engines (--data-parallel-size).

    python examples/measure_data_parallel.py --sizes 1 2  # an 8B's shape, random W4A16 weights

Starts `qserve serve` for each size and sends all requests at the same time. Two client processes
send them, because one would limit the rate. Prints output tokens per second and the time to the
first token.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from bench_shapes import SHAPES
from measure_start import READY, server_command, write_model

CLIENTS = 2


def start(folder: str, size: int, max_num_seqs: int) -> tuple[subprocess.Popen, str]:
    """Start a server, wait until it is ready, and yield its address."""
    settings = {"load_format": "dummy", "data_parallel_size": size}
    settings |= {"max_num_seqs": max_num_seqs, "max_model_len": 4096}
    command = server_command(folder, settings)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        print("  " + line.rstrip(), flush=True)
        if line.startswith(READY) and "http://" in line:
            threading.Thread(target=process.stdout.read, daemon=True).start()  # so it never waits
            return process, line.split()[-1]
    raise SystemExit(f"the server ended with code {process.wait()}")


def load(address: str, requests: int, tokens_in: int, tokens_out: int, seed: int) -> list[dict]:
    """Send requests of random tokens together, from all clients, and return the results."""
    with tempfile.TemporaryDirectory() as folder:
        clients = []
        for number in range(CLIENTS):
            command = [sys.executable, "-m", "qserve", "bench", "serve", "--base-url", address]
            command += ["--num-prompts", str(requests // CLIENTS), "--disable-tqdm"]
            command += ["--random-input-len", str(tokens_in), "--random-output-len"]
            command += [str(tokens_out), "--seed", str(seed + number), "--save-result"]
            command += ["--result-dir", folder, "--result-filename", f"{number}.json"]
            clients.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        if any(client.wait() for client in clients):
            raise SystemExit("a client failed")
        return [json.loads((Path(folder) / f"{n}.json").read_text()) for n in range(CLIENTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--scheme", default="w4a16-sym")
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 512], help="in each load")
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / arguments.shape, arguments.shape, arguments.scheme)
        for size in arguments.sizes:
            process, address = start(folder, size, arguments.max_num_seqs)
            try:
                load(address, 16 * size, arguments.input, 16, 99)  # warm-up
                for requests in arguments.requests:
                    found = load(address, requests, arguments.input, arguments.output, 0)
                    seconds = max(each["duration"] for each in found)
                    tokens = sum(each["total_output_tokens"] for each in found)
                    first = sum(each["mean_ttft_ms"] for each in found) / CLIENTS
                    rows.append((size, requests, tokens / seconds, first))
            finally:
                process.terminate()
                process.wait()
    print("engines  requests  output tokens/s  mean time to first token, ms")
    for size, requests, rate, first in rows:
        print(f"{size:7}  {requests:8}  {rate:15,.0f}  {first:28.1f}")


if __name__ == "__main__":
    main()
