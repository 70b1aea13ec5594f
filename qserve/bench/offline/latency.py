"""`qserve bench latency`: measure the time of one static batch in this process."""

import dataclasses
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from qserve.bench.machine import engine_settings, machine, write_json
from qserve.bench.offline.offline_settings import LatencySettings
from qserve.bench.statistics import mean, percentiles
from qserve.config import EngineConfig
from qserve.engine.sizes import check_input_len
from qserve.hub.local import local_config
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from qserve.profile.recorder import recorded
from qserve.profile.report import write_report

PERCENTILES = (10, 25, 50, 75, 90, 99)
MAX_ID = 10_000  # prompts have random token ids below this one, as in vLLM


def bench_latency(model: str, engine: EngineConfig, settings: LatencySettings) -> int:
    """Run `bench latency`. Each iteration begins with an empty prefix cache."""
    engine = local_config(engine)
    check_input_len(engine, settings.input_len, settings.output_len)
    llm = LLM(**dataclasses.asdict(engine))
    llm.capture_graphs()
    random = np.random.default_rng(engine.seed)
    shape = (settings.batch_size, settings.input_len)
    prompts = random.integers(0, min(MAX_ID, llm.engine.vocab_size), shape).tolist()
    params = SamplingParams(
        n=settings.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=settings.output_len,
        detokenize=not settings.disable_detokenize,
    )

    def run() -> tuple[float, float]:
        """Return the seconds to the end of the batch, and to the last request's first token."""
        llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        ended = time.perf_counter()
        first = max(output.metrics.first_token_time for output in outputs)
        return ended - started, first - started

    with tqdm(range(settings.num_iters_warmup), desc="Warmup iterations") as bar:
        for _ in bar:
            run()
    with tqdm(range(settings.num_iters), desc="Bench iterations") as bar:
        times = [run() for _ in bar]
    latencies, firsts = zip(*times, strict=True)
    found = percentiles(latencies, PERCENTILES)
    print(f"Avg latency: {mean(latencies)} seconds")
    for name, value in found.items():
        print(f"{name}% percentile latency: {value} seconds")
    print(f"Avg time to first token: {mean(firsts)} seconds")
    result = {
        "model_id": model,
        "avg_latency": mean(latencies),
        "latencies": latencies,
        "percentiles": found,
        "avg_first_token_latency": mean(firsts),
    }
    if settings.output_len > 1:
        steps = [(whole - first) / (settings.output_len - 1) for whole, first in times]
        print(f"Avg decode step: {1e3 * mean(steps)} ms")
        result["avg_decode_step_ms"] = 1e3 * mean(steps)
    result |= {"machine": machine(), "engine": engine_settings(engine)}
    write_json(settings.output_json, result)
    if settings.profile:
        trace = Path(settings.profile_dir) / "latency.trace.json.gz"
        with recorded(llm.engine.profiler.recorder, trace):
            run()
        print(write_report(trace))
    return 0
