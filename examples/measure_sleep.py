"""Measure sleep, wake, weight updates, and switching between two models of one server.

    python examples/measure_sleep.py                              # Llama-3-8B's shape, W4A16
    python examples/measure_sleep.py --shape qwen3-30b-a3b --memory 0.4 --skip switch

Writes random weights (--folder keeps them) and starts `qserve serve`. Then it sends the requests of
an operator and of a trainer. Each printed line is one operation, with the time of its request and
the GPU's memory afterwards. After each wake and update a request for one token checks that the
model answers. Lines of the server's log are indented. The trainer's tensors are bfloat16, on the
server's GPU if there is one, and are rounded by the server.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench_shapes import SHAPES
from write_dummy import write

from formats.architecture.float_linears import linear_shapes
from formats.checkpoint import CheckpointReader
from formats.layouts import quantized_modules
from qserve.model.model_config import ModelConfig
from qserve.training import send_weights

KEY = "operator"
# ways to send tensors -> arguments of send_weights
TRANSFERS = {
    "tensors": {"part_bytes": None, "digests": False},
    "tensors-in-parts": {"digests": False},
    "tensors-with-digests": {"part_bytes": None},
}
PARTS = ("level1", "level2", "folder", "float-folder", *TRANSFERS, "digest", "switch")
SHOWN = ("took", "Sleeping", "CUDA graphs:", "GPU memory", "rror")  # of the log's lines


class Server:
    """A server process, and requests to it."""

    def __init__(self, models: list[str], flags: list[str]) -> None:
        command = [sys.executable, "-u", "-m", "qserve", "serve", *models, "--port", "0"]
        self._process = subprocess.Popen(
            [*command, "--api-key", KEY, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.url = ""
        for line in self._process.stdout:
            self._show(line)
            if line.strip().rpartition(" ")[2].startswith("http://"):
                self.url = line.split()[-1]
                break
        if not self.url:
            raise SystemExit(f"the server ended with status {self._process.wait()}")
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._show(line)

    def _show(self, line: str) -> None:
        if any(word in line for word in SHOWN):
            print(f"    {line.rstrip()}", flush=True)

    def send(self, path: str, body: dict | None = None, method: str = "POST") -> dict:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=600) as reply:
            content = reply.read()
        return json.loads(content) if content else {}

    def token(self, model: str | None = None) -> None:
        """Request one token after a new prompt."""
        prompt = [5 + int.from_bytes(os.urandom(1)) % 90 for _ in range(16)]
        body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        self.send("/v1/completions", body if model is None else {**body, "model": model})

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def serving(models: list[str], flags: list[str]) -> Iterator[Server]:
    server = Server(models, flags)
    try:
        yield server
    finally:
        server.close()


def used_gib() -> float:
    """Return the GPU memory used by all processes."""
    if not torch.cuda.is_available():
        return float("nan")
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


class Times:
    """Times of operations in seconds, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def of(self, name: str, operation: Callable[[], object]) -> None:
        started = time.perf_counter()
        operation()
        took = time.perf_counter() - started
        self.seconds.setdefault(name, []).append(took)
        print(f"{name}: {took:.3f} s, {used_gib():.1f} GiB in use", flush=True)


def float_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return random tensors for the float model that a quantized folder was made from."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, entries = ModelConfig.from_folder(folder), CheckpointReader(folder).entries
    linears = linear_shapes(config.family, config.values, config.sizes)
    coded = set(quantized_modules(entries))
    shapes = {f"{name}.weight": linears[name] for name in linears if name in coded}
    shapes |= {
        name: entry.shape for name, entry in entries.items() if name.rpartition(".")[0] not in coded
    }
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        for name, shape in shapes.items()
    }


def measure_one(arguments: argparse.Namespace, folder: Path, times: Times) -> None:
    """Sleep, wake and update one model."""
    flags = ["--gpu-memory-utilization", str(arguments.memory), "--enable-admin-routes"]
    with serving([str(folder)], [*flags, *arguments.flags]) as server:
        server.token()
        print(f"awake: {used_gib():.1f} GiB in use", flush=True)
        for level in (1, 2):
            for _ in range(arguments.repeats if f"level{level}" in arguments.parts else 0):
                name = f"level {level}"
                times.of(f"sleep, {name}", lambda level=level: server.send(f"/sleep?level={level}"))
                times.of(f"wake, {name}", lambda: server.send("/wake_up"))
                times.of("token after a wake", server.token)
        if "digest" in arguments.parts:
            times.of("digests of a folder", lambda: server.send("/weights/digest", method="GET"))
        if "folder" in arguments.parts:
            update = {"model_path": str(folder)}
            for _ in range(arguments.repeats):
                times.of("update, folder", lambda: server.send("/update_weights_from_disk", update))
                times.of("token after an update", server.token)
        if "float-folder" in arguments.parts:
            floats = folder.parent / "floats"
            if not floats.exists():
                write(floats, arguments.shape, None)
            update = {"model_path": str(floats)}
            route = "/update_weights_from_disk"
            times.of("update, float folder", lambda: server.send(route, update))
        transfers = [name for name in TRANSFERS if name in arguments.parts]
        if transfers:
            tensors = float_tensors(folder)
            size = sum(each.nbytes for each in tensors.values()) / 2**30
            print(f"trainer: {len(tensors)} tensors, {size:.1f} GiB", flush=True)
            for name in transfers:
                times.of(
                    f"update, {name}",
                    lambda given=TRANSFERS[name]: send_weights(
                        server.url, tensors, api_key=KEY, **given
                    ),
                )
                times.of("token after an update", server.token)


def measure_switch(arguments: argparse.Namespace, folder: Path, times: Times) -> None:
    """Measure switching between two models of the same shape."""
    other = folder.parent / "other"
    if not other.exists():
        other.mkdir()
        for file in folder.iterdir():
            (other / file.name).symlink_to(file.resolve())
    flags = ["--gpu-memory-utilization", str(arguments.memory), "--memory-sharing", "sleep"]
    models = [str(folder), str(other)]
    with serving(models, [*flags, *arguments.flags]) as server:
        names = [each["id"] for each in server.send("/v1/models", method="GET")["data"]]
        for name in names:  # the first change of each allocates its host memory
            times.of("first switch to a model", lambda name=name: server.token(name))
        for turn in range(2 * arguments.repeats):
            times.of("switch and token", lambda turn=turn: server.token(names[turn % 2]))
            times.of("token without a switch", lambda turn=turn: server.token(names[turn % 2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--scheme", default="w4a16-sym")
    parser.add_argument("--memory", type=float, default=0.7, help="--gpu-memory-utilization")
    parser.add_argument("--folder", type=Path, help="folder for the weights, kept; default: none")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--skip", nargs="+", choices=PARTS, default=())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    arguments = parser.parse_args()
    arguments.parts = [part for part in arguments.parts if part not in arguments.skip]
    times = Times()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)) / "codes"
        if not folder.exists():
            times.of("write the folder", lambda: write(folder, arguments.shape, arguments.scheme))
        if set(arguments.parts) - {"switch"}:
            measure_one(arguments, folder, times)
        if "switch" in arguments.parts:
            measure_switch(arguments, folder, times)
    print("\nmedians, seconds")
    for name, seconds in times.seconds.items():
        print(f"{name}: {statistics.median(seconds):.3f} ({len(seconds)} times)")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(times.seconds, indent=2))


if __name__ == "__main__":
    main()
