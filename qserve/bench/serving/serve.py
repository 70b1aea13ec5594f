"""`qserve bench serve`: send requests to an OpenAI server and measure what its clients see.

Loads no torch.
"""

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.errors import InputError
from formats.table import count_text
from qserve.bench.requests.dataset import Sample, load_samples
from qserve.bench.requests.dataset_settings import SYNTHETIC, DatasetSettings
from qserve.bench.requests.token_text import TokenText
from qserve.bench.requests.traffic import arrival_times
from qserve.bench.serving.http_client import HttpClient, HttpFailure
from qserve.bench.serving.load_client import LoadClient
from qserve.bench.serving.serve_metrics import RequestRecord, ServeMetrics, table
from qserve.bench.serving.serve_settings import ServeBenchSettings, read_pairs
from qserve.bench.serving.speculation import speculation_counts, speculation_result
from qserve.bench.statistics import percentiles

LAG_SECONDS = 0.01  # interval at which the event loop's delay is measured
LAG_LIMIT_MS = 1.0  # if the 99th percentile is higher, the client itself is too slow
READY_PAUSE = 0.5  # seconds between attempts to reach the server


@dataclass(slots=True, kw_only=True)
class Lag:
    """Delays of the client itself in seconds, which show whether it is the bottleneck."""

    sends: list[float] = field(default_factory=list)  # time from each scheduled to the actual send
    loop: list[float] = field(default_factory=list)  # delays of the event loop

    async def watch(self) -> None:
        while True:
            due = time.perf_counter() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.loop.append(max(0.0, time.perf_counter() - due))

    def to_dict(self) -> dict[str, float]:
        sends, loop = (percentiles(v, [99])["99"] for v in (self.sends, self.loop))
        return {"client_send_lag_p99_ms": 1e3 * sends, "client_loop_lag_p99_ms": 1e3 * loop}


def bench_serve(model: str | None, settings: ServeBenchSettings, data: DatasetSettings) -> int:
    """Run `bench serve`. Return 1 if no request succeeded."""
    result = asyncio.run(run(settings, data))
    if result["completed"]:
        print(table(result, settings.metrics, settings.percentiles))
    else:
        print(
            f"{settings.url}: completed none of {result['failed']} requests, so there are no times",
            file=sys.stderr,
        )
    for error, count in result.pop("first_errors").items():
        print(f"{count_text(count, 'request')} failed: {error}", file=sys.stderr)
    lag = max(result["client_send_lag_p99_ms"], result["client_loop_lag_p99_ms"])
    if lag > LAG_LIMIT_MS:
        print(
            f"The client was up to {lag:.1f} ms late (99th percentile), which affects the measured"
            " times. Give it a free core, or reduce the load.",
            file=sys.stderr,
        )
    if settings.save_result or settings.append_result or settings.result_filename:
        print(f"Wrote {save(result, settings)}", file=sys.stderr)
    return 0 if result["completed"] else 1


async def run(settings: ServeBenchSettings, data: DatasetSettings) -> dict[str, Any]:
    """Send all requests and wait for them. Return a result with vLLM's keys and `first_errors`.

    Raises InputError.
    """
    headers = dict(settings.headers)
    key = settings.api_key or os.environ.get("OPENAI_API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    http = HttpClient(settings.url, headers, verify=not settings.insecure)
    try:
        model = settings.model or await first_model(http, settings.ready_check_timeout_sec)
        text = TokenText(data.tokenizer or model, data.random_vocab_size)
        samples = load_samples(data, text, settings.seed)
        client = LoadClient(settings, settings.served_model_name or model, http, text)
        made_up = data.dataset_name in SYNTHETIC and not settings.disable_ignore_eos
        ignore_eos = settings.ignore_eos or made_up
        bodies = [client.body(sample, ignore_eos) for sample in samples]
        await _warm_up(client, samples, bodies, settings)
        times = _times(settings, samples)
        drafts = await speculation_counts(http)
        if settings.profile:
            await _profile(http, "/start_profile")
        lag = Lag()
        started = time.perf_counter()
        records = await _send_all(client, samples, bodies, times, settings, lag)
        ended = max((record.end for record in records), default=started)
        if settings.profile:
            await _profile(http, "/stop_profile")
        metrics = ServeMetrics(records=records, duration=ended - started)
        result = _identity(settings, data, model, len(samples))
        result |= metrics.to_dict(
            metrics=settings.metrics, wanted=settings.percentiles, limits_ms=settings.limits_ms
        )
        result |= lag.to_dict()
        result |= speculation_result(drafts, await speculation_counts(http))
        if settings.save_detailed:
            result |= metrics.details()
        errors: dict[str, int] = {}
        for record in records:
            if record.error:
                errors[record.error] = errors.get(record.error, 0) + 1
        return result | {"first_errors": dict(list(errors.items())[:5])}
    finally:
        http.close()


async def first_model(http: HttpClient, wait: float) -> str:
    """Return the name of the first model that the server lists. Raises InputError."""
    problem = await _until_ready(lambda: http.request("GET", "/v1/models"), wait)
    if isinstance(problem, str):
        raise InputError("GET /v1/models", problem, "start the server, or check --base-url")
    try:
        return json.loads(problem)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise InputError("GET /v1/models", "lists no model", "set --model") from None


async def _until_ready(ask, wait: float) -> bytes | str:
    """Call `ask` until its status is 200, and return the body.

    After `wait` seconds, return the problem of the last call instead.
    """
    end = time.monotonic() + wait
    while True:
        try:
            code, body = await ask()
        except HttpFailure as error:
            problem = str(error)
        else:
            if code == 200:
                return body
            problem = f"status {code}"
        if time.monotonic() >= end:
            return problem
        await asyncio.sleep(READY_PAUSE)


async def _warm_up(
    client: LoadClient,
    samples: Sequence[Sample],
    bodies: Sequence[bytes],
    settings: ServeBenchSettings,
) -> None:
    """Repeat one request until the server completes it, then send the warm-up requests.

    Raises InputError.
    """
    if settings.ready_check_timeout_sec > 0:
        end = time.monotonic() + settings.ready_check_timeout_sec
        while (record := await client.send(samples[0], bodies[0])).error:
            if time.monotonic() >= end:
                raise InputError(
                    settings.url,
                    f"completed no request: {record.error}",
                    "check the server's log, or raise --ready-check-timeout-sec",
                )
            await asyncio.sleep(READY_PAUSE)
    if settings.num_warmups:
        limit = asyncio.Semaphore(settings.max_concurrency or settings.num_warmups)

        async def send(i: int) -> None:
            async with limit:
                await client.send(samples[i % len(samples)], bodies[i % len(samples)])

        await asyncio.gather(*[send(i) for i in range(settings.num_warmups)])


def _times(settings: ServeBenchSettings, samples: Sequence[Sample]) -> list[float]:
    """Return the send time of each sample, in seconds from the start."""
    if samples[0].arrival is not None:
        return [sample.arrival for sample in samples]
    ramp_up = None
    if settings.ramp_up_strategy is not None:
        ramp_up = (
            settings.ramp_up_strategy,
            settings.ramp_up_start_rps,
            settings.ramp_up_end_rps,
        )
    return arrival_times(
        len(samples),
        rate=settings.request_rate,
        burstiness=settings.burstiness,
        ramp_up=ramp_up,
        seed=settings.seed,
    )


async def _send_all(
    client: LoadClient,
    samples: Sequence[Sample],
    bodies: Sequence[bytes],
    times: Sequence[float],
    settings: ServeBenchSettings,
    lag: Lag,
) -> list[RequestRecord]:
    """Send each sample at its time, or later if --max-concurrency requires it.

    Return the records in the order of the samples.
    """
    from tqdm import tqdm

    places = asyncio.Semaphore(settings.max_concurrency) if settings.max_concurrency else None
    bar = tqdm(total=len(samples), disable=settings.disable_tqdm, mininterval=0.5)

    async def send(sample: Sample, body: bytes) -> RequestRecord:
        try:
            return await client.send(sample, body)
        finally:
            bar.update()
            if places is not None:
                places.release()

    watch = asyncio.create_task(lag.watch())
    tasks = []
    try:
        started = time.perf_counter()
        for sample, body, at in zip(samples, bodies, times, strict=True):
            delay = started + at - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            if places is not None:
                await places.acquire()
            elif at:
                lag.sends.append(max(0.0, time.perf_counter() - started - at))
            tasks.append(asyncio.create_task(send(sample, body)))
        return await asyncio.gather(*tasks)
    finally:
        watch.cancel()
        bar.close()
        for task in tasks:
            task.cancel()


async def _profile(http: HttpClient, path: str) -> None:
    try:
        code, _ = await http.request("POST", path)
    except HttpFailure as error:
        code = str(error)
    if code != 200:
        raise InputError(
            f"POST {path}", f"failed: {code}", "start the server with --profiler-config"
        )


def _identity(
    settings: ServeBenchSettings, data: DatasetSettings, model: str, num_prompts: int
) -> dict[str, Any]:
    """Return the keys of vLLM's result that describe the run."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": settings.backend,
        "backend": settings.backend,
        "label": settings.label,
        "model_id": model,
        "tokenizer_id": data.tokenizer or model,
        "num_prompts": num_prompts,
        **read_pairs("--metadata", settings.metadata),
        "request_rate": settings.request_rate if math.isfinite(settings.request_rate) else "inf",
        "burstiness": settings.burstiness if math.isfinite(settings.burstiness) else "inf",
        "max_concurrency": settings.max_concurrency,
    }
    if settings.ramp_up_strategy is not None:
        found |= {
            "ramp_up_strategy": settings.ramp_up_strategy,
            "ramp_up_start_rps": settings.ramp_up_start_rps,
            "ramp_up_end_rps": settings.ramp_up_end_rps,
        }
    return found


def save(result: dict[str, Any], settings: ServeBenchSettings) -> Path:
    """Write the result as JSON and return the path. The default name is the same as in vLLM."""
    name = settings.result_filename
    if name is None:
        concurrency = f"-concurrency{settings.max_concurrency}" if settings.max_concurrency else ""
        label = settings.label or settings.backend
        base = result["model_id"].rstrip("/").split("/")[-1]
        name = f"{label}-{settings.request_rate}qps{concurrency}-{base}-{result['date']}.json"
    path = Path(settings.result_dir or ".") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if settings.append_result else "w", encoding="utf-8") as file:
        if settings.append_result and file.tell():
            file.write("\n")
        json.dump(result, file)
    return path
