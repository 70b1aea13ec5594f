"""`qserve bench startup`: measure the time from the start of a process to its first token.

In a cold start the cache of compiled kernels is empty. A warm start finds kernels compiled by an
earlier start. In both the model's files may be in the operating system's page cache. This module
loads no torch, but the processes that it starts do.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from formats.errors import InputError
from qserve.bench.offline.offline_settings import StartupSettings
from qserve.bench.statistics import mean, percentiles
from qserve.config import EngineConfig
from qserve.hub.local import local_config

PERCENTILES = (10, 25, 50, 75, 90, 99)
ROWS = {  # row of the table -> (begin, end) of its period
    "process to imports": ("started", "imported"),
    "imports to ready": ("imported", "ready"),
    "ready to first token": ("ready", "first_token"),
    "process to ready": ("started", "ready"),
    "process to first token": ("started", "first_token"),
}


def bench_startup(model: str, engine: EngineConfig, settings: StartupSettings) -> int:
    """Run `bench startup`. In the results, "startup" is process start to ready, as in vLLM."""
    engine = local_config(engine)
    cold: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as caches:
        for i in range(settings.num_iters_cold):
            cache = os.path.join(caches, str(i))
            cold.append(start(engine, settings.input_len, cache))
            print(_line("cold", cold[-1]), flush=True)
        # Warm starts use the cache of the last cold start.
        for _ in range(settings.num_iters_warmup):
            start(engine, settings.input_len, cache)
        warm = []
        for _ in range(settings.num_iters_warm):
            warm.append(start(engine, settings.input_len, cache))
            print(_line("warm", warm[-1]), flush=True)
    result: dict[str, Any] = {"model_id": model}
    for name, starts in (("cold", cold), ("warm", warm)):
        print(f"{f' {name} start ':=^50}")
        for row, (begin, end) in ROWS.items():
            values = [each[end] - each[begin] for each in starts]
            print(f"{f'{row} (s):':<40} {mean(values):<10.2f}")
        for phase in starts[-1]["phases"]:
            values = [each["phases"].get(phase, 0.0) for each in starts]
            print(f"{f'  {phase} (s):':<40} {mean(values):<10.2f}")
        whole = [each["ready"] - each["started"] for each in starts]
        first = [each["first_token"] - each["started"] for each in starts]
        compiling = [
            sum(value for phase, value in each["phases"].items() if phase.startswith("Compiling"))
            for each in starts
        ]
        for key, values in (
            (f"{name}_startup", whole),
            (f"{name}_compilation", compiling),
            (f"{name}_first_token", first),
        ):
            result[f"avg_{key}_time"] = mean(values)
            result[f"{key}_times"] = values
            result[f"{key}_percentiles"] = percentiles(values, PERCENTILES)
        result[f"{name}_phases"] = [each["phases"] for each in starts]
    result["engine"] = dataclasses.asdict(engine)
    if settings.output_json is not None:
        with open(settings.output_json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=4)
    return 0


def _line(name: str, found: dict[str, Any]) -> str:
    ready, first = (found[each] - found["started"] for each in ("ready", "first_token"))
    return f"{name} start: ready after {ready:.2f} s, first token after {first:.2f} s"


def start(engine: EngineConfig, input_len: int, cache: str) -> dict[str, Any]:
    """Start one process with `cache` as its folder of compiled kernels.

    Return its times, measured by time.time(), and the durations of its phases.
    """
    command = [sys.executable, "-m", "qserve.bench.offline.start_once"]
    command += [json.dumps(dataclasses.asdict(engine)), str(input_len)]
    started = time.time()
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(
            engine.model, f"did not start: {last}", "run `qserve generate` with it to see its log"
        )
    return {"started": started, **json.loads(done.stdout.strip().splitlines()[-1])}
