"""Compare prefill and decode on different engines with other uses of the GPUs, at equal load.

    python examples/measure_disaggregated.py --rates 2 4 --json apart.json  # two GPUs

Three services get the same requests at the same (Poisson) times: one engine on one GPU; two engines
(--data-parallel-size 2); and a prefill engine with a decode engine (--prefill-engines 1). Printed
are the time to the first token, the inter-token latency (ITL), and output tokens per second from
the first request to the end of the last. The model has Llama-3-8B's shape and random weights in
W4A16.

On a CPU:

    python examples/measure_disaggregated.py --device cpu --shape tiny --input 128 --output 8
"""

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

from bench_shapes import SHAPES, check_device, write_config

from qserve.config import EngineConfig
from qserve.engine.ipc.start_engines import start_engines
from qserve.params.sampling_params import SamplingParams

SERVICES = {
    "one engine": {},
    "two engines": {"data_parallel_size": 2},
    "apart": {"prefill_engines": 1},
    "four engines": {"data_parallel_size": 4},
    "apart, two and two": {"data_parallel_size": 2, "prefill_engines": 2},
}


@dataclass(slots=True)
class Times:
    """Times of one request's events."""

    sent: float
    tokens: list[float] = field(default_factory=list)  # of each output token

    @property
    def first(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def between(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


async def run_load(engines, arguments: argparse.Namespace, rate: float, seed: int) -> list[Times]:
    """Send requests at random times. Returns the times of each."""
    draw = random.Random(seed)
    vocab = SHAPES[arguments.shape]["vocab_size"]
    params = SamplingParams(max_tokens=arguments.output, temperature=0.0, ignore_eos=True)

    async def run(name: str, ids: list[int]) -> Times:
        times = Times(time.perf_counter())

        def note(event) -> None:
            times.tokens += [time.perf_counter()] * len(event.token_ids)

        async for event in engines.generate(name, ids, params, note):
            if event.error:
                raise SystemExit(f"request {name} failed: {event.error}")
        return times

    tasks = []
    for number in range(arguments.requests):
        ids = [draw.randrange(3, vocab) for _ in range(arguments.input)]
        tasks.append(asyncio.create_task(run(f"{seed}-{number}", ids)))
        await asyncio.sleep(draw.expovariate(rate))
    return await asyncio.gather(*tasks)


def summary(found: list[Times]) -> dict[str, float]:
    firsts = [times.first * 1e3 for times in found]
    between = [each * 1e3 for times in found for each in times.between]
    ends = max(times.tokens[-1] for times in found)
    seconds = ends - min(times.sent for times in found)
    return {
        "ttft_p50_ms": percentile(firsts, 50),
        "ttft_p99_ms": percentile(firsts, 99),
        "itl_p50_ms": percentile(between, 50),
        "itl_p99_ms": percentile(between, 99),
        "tokens_per_s": sum(len(times.tokens) for times in found) / seconds,
    }


def percentile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


async def measure(folder: str, name: str, arguments: argparse.Namespace) -> list[dict]:
    config = EngineConfig(
        model=folder,
        device=arguments.device,
        load_format="dummy",
        max_model_len=arguments.input + arguments.output + 64,
        max_num_seqs=arguments.max_num_seqs,
        **SERVICES[name],
    )
    started = time.perf_counter()
    engines = await start_engines(config)
    ready = time.perf_counter() - started
    rows = []
    try:
        await run_load(engines, arguments, max(arguments.rates), seed=1)  # warm-up, and graphs
        for rate in arguments.rates:
            found = await run_load(engines, arguments, rate, seed=2 + len(rows))
            rows.append({"service": name, "rate": rate, "ready_s": ready} | summary(found))
            texts = [f"{key} {value:.4g}" for key, value in rows[-1].items() if key != "service"]
            print(f"{name}: {', '.join(texts)}", flush=True)
    finally:
        await engines.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--services", nargs="+", choices=SERVICES, default=list(SERVICES)[:3])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--scheme", default="w4a16-sym")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0], help="requests/s")
    parser.add_argument("--requests", type=int, default=48, help="in each load")
    parser.add_argument("--input", type=int, default=4000)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--json", help="file to write the results to")
    arguments = parser.parse_args()
    check_device(arguments.device, "add --device cpu --shape tiny")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.shape, arguments.scheme)
        for name in arguments.services:
            rows += asyncio.run(measure(folder, name, arguments))
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
