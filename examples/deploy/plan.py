"""Plan a service on many GPUs by simulation: `python examples/deploy/plan.py --gpus 1000`.

Simulates one cell (one router with several replicas) under the load of agents with several turns,
and multiplies the result. The simulation runs the engine's own scheduler, page pool and prefix
cache. Step times are fitted to measurements on one H200 (examples/MEASURED.md). The cost of
networks and gateways is not included.
"""

import argparse
import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from qserve.bench.requests.dataset_settings import DatasetSettings
from qserve.bench.simulation.simulate import simulate
from qserve.bench.simulation.simulate_settings import SimulateSettings
from qserve.bench.steps.step_times import KEYS, PAIRS, StepTimes

# Llama-3-8B's shape in W4A16 on one H200 (MEASURED.md, "Decode"): rows, mean context, milliseconds
DECODES = (
    *((1, 256, 1.81), (2, 256, 1.83), (4, 256, 1.94), (8, 256, 2.07), (16, 256, 2.33)),
    *((32, 256, 2.70), (64, 256, 3.63), (128, 256, 5.25), (128, 1056, 9.33)),
)
# a prompt's tokens, milliseconds to its first token
PROMPTS = ((512, 11.7), (768, 17.3), (1000, 20.8), (2048, 40.9), (8000, 179))
# 141 GB * 0.9, less 6 GB of weights and 4 GB of activations and graphs, at 2 MiB a page
NUM_PAGES = 55_000
TURNS, PAUSE_SECONDS = 8, 5.0
BLOCK = 512  # tokens per hash of the trace
# Interruptions while Llama 3 405B was trained: 419 in 54 days of 16,384 GPUs (arXiv 2407.21783).
GPU_HOURS_TO_A_FAILURE = 16_384 * 54 * 24 / 419


def step_times() -> StepTimes:
    """Fit step times. Keys and pairs come from steps that differ in nothing else."""
    (rows, short, fast), (_, long, slow) = DECODES[-2:]
    per_key = (slow - fast) / (rows * (long - short))
    # The last three prompts give a constant, a cost per token, and a cost per (token, key) pair.
    equations = [(1, tokens, tokens * tokens / 2) for tokens, _ in PROMPTS[-3:]]
    _, _, per_pair = np.linalg.solve(equations, [ms for _, ms in PROMPTS[-3:]])
    products = {rows: ms - per_key * rows * context for rows, context, ms in DECODES[:-1]}
    products |= {tokens: ms - per_pair * tokens**2 / 2 for tokens, ms in PROMPTS}
    return StepTimes(
        token_counts=tuple(map(float, products)),
        product_seconds=tuple(ms / 1e3 for ms in products.values()),
        key_seconds=per_key * KEYS / 1e3,
        pair_seconds=per_pair * PAIRS / 1e3,
    )


def write_trace(path: Path, *, rate: float, count: int, seed: int = 0) -> None:
    """Write the requests of agents of 40 applications. `rate`: requests per second.

    An agent has a system prompt of 1024 tokens, then 8 turns of 512 tokens on average, 5 s apart on
    average.
    """
    random = np.random.default_rng(seed)
    new = itertools.count(1000)
    warm_up = 3 * TURNS * PAUSE_SECONDS  # until as many requests end as begin
    rows, start = [], -warm_up
    while start < count / rate:
        start += random.exponential(TURNS / rate)
        application = int(random.zipf(1.5)) % 40
        ids, at = [2 * application, 2 * application + 1], start
        for _ in range(int(random.geometric(1 / TURNS))):
            ids = [*ids, next(new)]
            output = int(random.integers(50, 350))
            rows.append((at, ids, output))
            at += random.exponential(PAUSE_SECONDS)
    rows = sorted(row for row in rows if row[0] >= 0)[:count]
    with path.open("w") as file:
        for at, ids, output in rows:
            row = {"timestamp": round(1e3 * at), "input_length": BLOCK * len(ids)}
            row |= {"output_length": output, "hash_ids": ids}
            file.write(json.dumps(row) + "\n")


def hit_rate(settings: SimulateSettings, data: DatasetSettings, times: StepTimes) -> dict:
    """Return the simulation's result, with the fraction of prompt tokens found in the cache."""
    computed = 0

    def watch(start: float, plan: object, end: float) -> None:
        nonlocal computed
        computed += sum(chunk.count for chunk in plan.chunks if chunk.count > 1)

    result = simulate(settings, data, times, watch)
    return result | {"hit_rate": 1 - computed / result["total_input_tokens"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=1000, help="number of GPUs, one replica each")
    parser.add_argument("--cell", type=int, default=4, help="replicas of one router")
    parser.add_argument("--per-replica", type=float, nargs="+", default=[4.0, 8.0])
    parser.add_argument("--requests", type=int, default=1500, help="requests per simulated cell")
    parser.add_argument(
        "--routers", nargs="+", default=["round-robin", "least-outstanding", "prefix-load"]
    )
    arguments = parser.parse_args()
    times = step_times()
    keys, pairs = 1e3 * times.key_seconds, 1e3 * times.pair_seconds
    print(f"100,000 keys take {keys:.2f} ms, 10 M pairs {pairs:.2f} ms")
    print("router, requests/s a replica: prefix hits, TTFT p50 and p99, TPOT p50 in ms, busy")
    for rate in arguments.per_replica:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.jsonl"
            write_trace(path, rate=rate * arguments.cell, count=arguments.requests)
            data = DatasetSettings(num_prompts=arguments.requests)
            settings = SimulateSettings(
                trace=str(path),
                step_ms=1,  # not read: the times are given
                num_pages=NUM_PAGES,
                prefix_caching=True,
                replicas=arguments.cell,
            )
            for router in arguments.routers:
                found = hit_rate(replace(settings, router=router), data, times)
                print(
                    f"{router}, {rate:g}: {found['hit_rate']:.2f},"
                    f" {found['median_ttft_ms']:.0f} and {found['p99_ttft_ms']:.0f},"
                    f" {found['median_tpot_ms']:.1f}, {found['busy_share']:.2f}",
                    flush=True,
                )
    hours = GPU_HOURS_TO_A_FAILURE / arguments.gpus
    print(f"{arguments.gpus} GPUs: one fails every {hours:.0f} h, {24 * 30 / hours:.0f} a month")


if __name__ == "__main__":
    main()
