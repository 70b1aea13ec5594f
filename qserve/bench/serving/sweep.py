"""`qserve bench sweep serve`: run a benchmark with each combination of settings. Loads no torch.

As in vLLM, each combination has a folder with run=N.json, summary.json and summary.csv.
"""

import csv
import itertools
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from formats.errors import CHECK_ACCESS, InputError, one_line
from qserve.bench.serving.sweep_settings import SweepSettings
from qserve.bench.statistics import mean
from qserve.processes.child_process import stop_blocking

STOP_SECONDS = 60  # time for a server to end


def bench_sweep_serve(settings: SweepSettings) -> int:
    """Run `bench sweep serve`. Return 1 if a run failed; the results of the others are kept."""
    servers, benches = _params(settings.serve_params), _params(settings.bench_params)
    if settings.workload_var is not None:
        if settings.workload_values is None:
            raise InputError("--workload-var", "requires --workload-values", "such as 1,2,4")
        values = settings.workload_values.split(",")
        benches = [
            {**bench, settings.workload_var: value}
            for bench, value in itertools.product(benches, values)
        ]
    root = Path(settings.output_dir) / (settings.experiment_name or time.strftime("%Y%m%d_%H%M%S"))
    failed, summaries = 0, []
    for server in servers:
        with _server(settings, server):
            for bench in benches:
                folder = root / _name({**server, **bench})
                runs, num_failed = _run_all(settings, bench, folder)
                failed += num_failed
                if runs:
                    summaries.append({**server, **bench, **_means(runs)})
                    _write(folder, [{**server, **bench, **run} for run in runs])
    if summaries:
        _write(root, summaries)
        print(f"Wrote {root / 'summary.csv'}")
    if failed:
        print(f"{failed} runs failed or wrote no result", file=sys.stderr)
    return 1 if failed else 0


def command_of(command: str, params: Mapping[str, Any]) -> list[str]:
    """Return the words of a command with some flags added.

    True adds a flag without a value. False and None add nothing.
    """
    words = shlex.split(command)
    if words[0] == "qserve":
        words = [sys.executable, "-m", *words]
    for name, value in params.items():
        if value is False or value is None:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def _run_all(
    settings: SweepSettings, bench: Mapping[str, Any], folder: Path
) -> tuple[list[dict[str, Any]], int]:
    """Run a combination --num-runs times. Return the results and the number of failures."""
    runs, failed = [], 0
    for index in range(settings.num_runs):
        path = folder / f"run={index}.json"
        words = command_of(settings.bench_cmd, bench)
        words += ["--save-result", "--result-dir", str(folder), "--result-filename", path.name]
        if settings.dry_run:
            print(shlex.join(words))
            continue
        if not (settings.resume and path.is_file()):
            folder.mkdir(parents=True, exist_ok=True)
            print(shlex.join(words), flush=True)
            if subprocess.run(words, check=False).returncode or not path.is_file():
                failed += 1
                continue
            if settings.after_bench_cmd is not None:
                code = subprocess.run(shlex.split(settings.after_bench_cmd), check=False).returncode
                if code:
                    raise InputError(
                        "--after-bench-cmd",
                        f"ended with exit code {code}",
                        "run the command alone to see its error",
                    )
        runs.append(json.loads(path.read_text(encoding="utf-8")))
    return runs, failed


@contextmanager
def _server(settings: SweepSettings, params: Mapping[str, Any]) -> Iterator[None]:
    """Run a server with --serve-cmd, if stated. Raises InputError if it does not become ready."""
    if settings.serve_cmd is None:
        yield
        return
    words = command_of(settings.serve_cmd, params)
    print(shlex.join(words), flush=True)
    if settings.dry_run:
        yield
        return
    port = _port(words)
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        raise InputError(
            "--serve-cmd",
            f"port {port} is in use: the benchmark would measure another server",
            "end that server, or choose another --port",
        )
    process = subprocess.Popen(words)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health", settings.ready_timeout)
        yield
    finally:
        stop_blocking(process, STOP_SECONDS)


def _port(words: list[str]) -> int:
    """Return the port of a server's command, as `--port N` or `--port=N`. Raises InputError."""
    port = "8000"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--port":
            port = following
        elif word.startswith("--port="):
            port = word.removeprefix("--port=")
    if not port.isdecimal():
        raise InputError(
            "--serve-cmd",
            f"expected a number after --port, found {port!r}",
            "write --port 8000, or leave it out for 8000",
        )
    return int(port)


def _wait_until_ready(process: subprocess.Popen, url: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            code = process.poll()
            if code is not None:
                raise InputError(
                    "--serve-cmd",
                    f"ended with exit code {code}",
                    "run the command alone to see its error",
                ) from None
            if time.monotonic() >= end:
                raise InputError(
                    "--serve-cmd", f"was not ready after {seconds:g} s", "raise --ready-timeout"
                ) from None
            time.sleep(0.5)


def _params(path: str | None) -> list[dict[str, Any]]:
    if path is None:
        return [{}]
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(path, f"cannot be read: {one_line(error)}", CHECK_ACCESS) from None
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list) or not found or not all(isinstance(e, dict) for e in found):
        raise InputError(
            path, "expected a list of objects of flags", 'such as [{"max-num-seqs": 8}]'
        )
    return found


def _name(params: Mapping[str, Any]) -> str:
    parts = [f"{key}={value}" for key, value in params.items()]
    return "-".join(parts).replace("/", "_") or "default"


def _means(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each number; for values that are no numbers, the first one."""
    found = {}
    for key, value in runs[0].items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        values = [run.get(key) for run in runs]
        same = is_number and all(isinstance(each, int | float) for each in values)
        found[key] = mean(values) if same else value
    return found


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(rows, indent=4) + "\n", encoding="utf-8")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with (folder / "summary.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)
