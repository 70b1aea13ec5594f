"""`qserve bench simulate`: run requests through the engine's scheduler on a virtual clock.

The result and the table have the form of those of `bench serve`. Equal settings give equal results.
Loads no torch.
"""

import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.errors import InputError
from qserve.bench.requests.dataset import load_samples
from qserve.bench.requests.dataset_settings import DatasetSettings
from qserve.bench.requests.token_text import TokenText
from qserve.bench.requests.trace import read_trace
from qserve.bench.requests.traffic import arrival_times
from qserve.bench.serving.serve_metrics import RequestRecord, ServeMetrics, table
from qserve.bench.simulation.replica import Replica, SimulatedRequest, Watch
from qserve.bench.simulation.router import make_router
from qserve.bench.simulation.simulate_settings import SimulateSettings
from qserve.bench.steps.step_times import StepTimes
from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.scheduling.policies import make_policy
from qserve.engine.scheduling.scheduler import Scheduler

TITLE = "Simulated Serving Result"
# With more requests the times of single tokens are not recorded, and ITL is not reported.
MAX_WITH_TOKEN_TIMES = 50_000
MAX_RATE = 1e5  # requests per second; --find-max-rate stops there
GOOD_SHARE = 0.99  # share of requests that must meet the limits of --find-max-rate


def bench_simulate(settings: SimulateSettings, data: DatasetSettings) -> int:
    """Run `bench simulate`."""
    times = step_times(settings)
    if settings.find_max_rate:
        settings = replace(settings, request_rate=find_max_rate(settings, data, times))
        print(f"Highest rate that meets the limits: {settings.request_rate:.2f} requests/s")
    started = time.perf_counter()
    result = simulate(settings, data, times)
    elapsed = time.perf_counter() - started
    metrics = [name for name in settings.metrics if f"mean_{name}_ms" in result]
    print(table(result, metrics, settings.percentiles, TITLE))
    print(
        f"Simulated {result['num_steps']} steps in {elapsed:.1f} s: {result['num_preempted']}"
        f" preemptions, at most {result['peak_pages']} of {settings.num_pages} KV pages in use"
    )
    if settings.steps is not None:
        print(
            "The fitted step times differ from the measured ones by"
            f" {100 * times.error:.1f} % on average"
        )
    if settings.output_json is not None:
        Path(settings.output_json).parent.mkdir(parents=True, exist_ok=True)
        Path(settings.output_json).write_text(json.dumps(result, indent=4) + "\n")
    return 0


def step_times(settings: SimulateSettings) -> StepTimes:
    if settings.steps is not None:
        return StepTimes.read(settings.steps)
    return StepTimes.fixed(settings.step_ms / 1e3)


def simulate(
    settings: SimulateSettings,
    data: DatasetSettings,
    times: StepTimes,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Simulate all requests. Return a result with the keys of `bench serve`. Raises InputError."""
    requests = make_requests(settings, data)
    keep = len(requests) <= MAX_WITH_TOKEN_TIMES
    replicas = [
        Replica(
            make_scheduler(settings),
            times,
            steps_in_flight=int(not settings.sync_scheduling),
            keep_times=keep,
            watch=watch,
            max_tokens=settings.max_tokens,
        )
        for _ in range(settings.replicas)
    ]
    drive(replicas, requests, settings)
    records = [_record(each) for each in requests]
    begin = min(record.start for record in records)
    metrics = ServeMetrics(records=records, duration=max(record.end for record in records) - begin)
    names = [name for name in settings.metrics if keep or name != "itl"]
    rate = settings.request_rate
    return {
        "simulated": True,
        "backend": "simulate",
        "num_prompts": len(requests),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "replicas": settings.replicas,
        "router": settings.router,
        "scheduling_policy": settings.scheduling_policy,
        "admission": settings.admission,
        **metrics.to_dict(
            metrics=names, wanted=settings.percentiles, limits_ms=settings.limits_ms or None
        ),
        "num_steps": sum(each.num_steps for each in replicas),
        "num_preempted": sum(each.num_preempted for each in replicas),
        "peak_pages": max(each.peak_pages for each in replicas),
        "busy_share": sum(each.busy_seconds for each in replicas)
        / (settings.replicas * metrics.duration),
    }


def make_scheduler(settings: SimulateSettings) -> Scheduler:
    """Create a scheduler in the same way as the engine."""
    return Scheduler(
        BlockPool(settings.num_pages, settings.block_size),
        max_num_seqs=min(settings.max_num_seqs, settings.max_num_batched_tokens),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        policy=make_policy(
            settings.scheduling_policy, prefill_batch_size=settings.prefill_batch_size
        ),
        prefix_caching=settings.prefix_caching,
        forecasts=settings.admission == "forecast",
    )


def make_requests(settings: SimulateSettings, data: DatasetSettings) -> list[SimulatedRequest]:
    """Return the requests in order of arrival. Prompts have tokens only with --prefix-caching."""
    if settings.trace is None or settings.prefix_caching:
        if settings.trace is not None:
            if not read_trace(settings.trace, 1)[0].hash_ids:
                raise InputError(
                    settings.trace,
                    "does not state which prompts share a prefix (hash_ids)",
                    "leave out --prefix-caching, or give a trace in Mooncake's form",
                )
            data = replace(
                data,
                dataset_name="timed_trace",
                dataset_path=settings.trace,
                use_trace_timestamps=True,
            )
        samples = load_samples(data, TokenText(None, data.random_vocab_size), settings.seed)
        rate = settings.request_rate
        arrivals = arrival_times(
            len(samples), rate=rate, burstiness=settings.burstiness, seed=settings.seed
        )
        return [
            SimulatedRequest(
                name=str(index),
                arrival=at if sample.arrival is None else sample.arrival,
                input_len=sample.prompt_len,
                output_len=sample.output_len,
                prompt=sample.prompt if settings.prefix_caching else None,
            )
            for index, (sample, at) in enumerate(zip(samples, arrivals, strict=True))
        ]
    rows = read_trace(settings.trace, data.num_prompts)
    return [
        SimulatedRequest(
            name=str(index),
            arrival=row.arrival * data.time_scale,
            input_len=row.input_len,
            output_len=row.output_len,
        )
        for index, row in enumerate(rows)
    ]


def drive(
    replicas: Sequence[Replica], requests: Sequence[SimulatedRequest], settings: SimulateSettings
) -> None:
    """Run the replicas until all requests have ended.

    Each request is sent at its time, or later if --max-concurrency requires it. The next step is
    always one of the replica with the earliest clock.
    """
    choose = make_router(settings.router, settings.seed)
    waiting = deque(requests)
    overhead = settings.request_overhead_ms / 1e3
    num_open, place_since = 0, 0.0
    while True:
        at = math.inf
        if waiting and (settings.max_concurrency or math.inf) > num_open:
            at = max(waiting[0].arrival, place_since if settings.max_concurrency else 0.0)
        busy = [each for each in replicas if each.has_work]
        behind = min(busy, key=lambda each: each.clock, default=None)
        if behind is None and at == math.inf:
            return
        if behind is None or at + overhead <= behind.clock:
            request = waiting.popleft()
            request.arrival = at
            request.sent = at + overhead
            replicas[choose(replicas, request)].add(request)
            num_open += 1
            continue
        ended = behind.step()
        if ended:
            num_open -= len(ended)
            place_since = behind.clock


def find_max_rate(settings: SimulateSettings, data: DatasetSettings, times: StepTimes) -> float:
    """Find the highest rate that meets the limits, by bisection to 2 %. Raises InputError."""

    def is_good(rate: float) -> bool:
        found = simulate(replace(settings, request_rate=rate), data, times)
        return found["request_goodput"] >= GOOD_SHARE * found["request_throughput"]

    low, high = 0.01, 0.02
    if not is_good(low):
        raise InputError("--goodput", f"is missed at {low} requests/s", "raise the limits")
    while is_good(high):
        low, high = high, 2 * high
        if high > MAX_RATE:
            raise InputError(
                "--num-prompts",
                f"{data.num_prompts} requests meet the limits at every rate, since they are too few"
                " to load the server",
                "give more",
            )
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low


def _record(request: SimulatedRequest) -> RequestRecord:
    times = list(request.token_times) or [request.first_token, request.last_token]
    return RequestRecord(
        prompt_len=request.input_len,
        start=request.arrival,
        output_len=request.output_len,
        token_times=times,
        end=request.last_token,
    )
