"""Prometheus metrics of the server and its engine.

A metric with the same meaning as in vLLM has vLLM's name, with the prefix qserve instead of vllm.
Label values are the served model's name, routes, statuses and fixed reasons, so clients cannot
create new ones.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from qserve.config import EngineConfig
from qserve.engine.report import EngineReport
from qserve.engine.token_event import RequestFacts, TokenEvent
from qserve.server.http.clients import Admission

REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("outputs", "prompt_tokens")  # reasons for rejections, in the order of Admission.held

# gauges that are read from the engine's last report: name -> (help text, value)
GAUGES: dict[str, tuple[str, Callable[[EngineReport], float]]] = {
    "num_requests_running": ("Outputs in the running set.", lambda r: r.num_running),
    "num_requests_waiting": ("Outputs waiting in the engine's queue.", lambda r: r.num_waiting),
    "num_tokens_waiting": (
        "Prompt tokens that waiting outputs have to compute before their first token.",
        lambda r: r.num_waiting_tokens,
    ),
    "kv_cache_pages": ("Total number of KV pages.", lambda r: r.num_pages),
    "kv_cache_pages_used": ("KV pages in use.", lambda r: r.num_pages_used),
    "kv_cache_usage_perc": (
        "Fraction of the KV pages in use, from 0 to 1.",
        lambda r: r.num_pages_used / max(1, r.num_pages),
    ),
    "engine_paused": ("1 while an operator has paused generation.", lambda r: r.is_paused),
    "engine_sleeping": (
        "1 while weights or KV pages are not on the device.",
        lambda r: r.is_sleeping,
    ),
}
# vLLM's older metric names, which its dashboards and its production stack still read. They are
# served with the prefix vllm only. The value is the current name; None: the metric is always 0,
# since nothing is swapped to the CPU.
OLD_GAUGES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "cpu_cache_usage_perc": None,
    "num_requests_swapped": None,
}
OLD_COUNTERS = {
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
}
OLD_HISTOGRAMS = {"time_per_output_token_seconds": "inter_token_latency_seconds"}
# methods that become label values; a client may send any other word as a method
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# in the order of Admission.held
ADMITTED = {
    "num_requests_admitted": "Outputs running or queued, limited by --max-num-queued-reqs.",
    "num_prompt_tokens_admitted": (
        "Prompt tokens of running and queued outputs, limited by --max-num-queued-tokens."
    ),
}
COUNTERS = {
    "engine_restarts": "Number of times the engine process was restarted.",
    "num_preemptions": "Number of preemptions: KV pages freed, to be recomputed later.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache and not computed again.",
    "external_prefix_cache_queries": "Tokens looked up in the KV caches of other engines.",
    "external_prefix_cache_hits": "Tokens whose KV pages came from another engine.",
    "prompt_tokens": "Prompt tokens of outputs with at least one token, counted once per output.",
    "prompt_tokens_cached": "Prompt tokens of these outputs whose KV pages were cached.",
    "generation_tokens": "Generated tokens.",
    "spec_decode_num_drafts": "Verified drafts, one per output and step.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
}
# Bucket bounds in seconds. Tokens are milliseconds apart; a whole request may take an hour.
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
    *(5, 10, 20, 40, 80),
)
REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
LAG_INTERVAL = 0.05
LAG_SECONDS = (*(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5), 10)
STEP_TOKENS = tuple(2**i for i in range(15))
LENGTHS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
NUMBERS = (1, 2, 5, 10, 20, 50, 100)
HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "Seconds from a request's arrival to the first token, for each of its outputs.",
        REQUEST_SECONDS,
    ),
    "inter_token_latency_seconds": (
        "Seconds between consecutive tokens of an output.",
        TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": (
        "Seconds from a request's arrival to the last token, for each finished output.",
        REQUEST_SECONDS,
    ),
    "request_queue_time_seconds": (
        "Seconds from submission to the engine to an output's first step.",
        REQUEST_SECONDS,
    ),
    "request_prefill_time_seconds": (
        "Seconds from an output's first step to its first token.",
        REQUEST_SECONDS,
    ),
    "request_decode_time_seconds": (
        "Seconds from an output's first token to its last.",
        REQUEST_SECONDS,
    ),
    "request_inference_time_seconds": (
        "Seconds from an output's first step to its last token.",
        REQUEST_SECONDS,
    ),
    "request_time_per_output_token_seconds": (
        "Mean seconds between consecutive tokens of an output.",
        TOKEN_SECONDS,
    ),
    "request_prompt_tokens": ("Prompt tokens of each finished output.", LENGTHS),
    "request_generation_tokens": ("Generated tokens of each finished output.", LENGTHS),
    "request_max_num_generation_tokens": (
        "Tokens of the longest output of each API request whose outputs all finished.",
        LENGTHS,
    ),
    "request_num_preemptions": (
        "Preemptions of each finished output.",
        NUMBERS,
    ),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of each finished output that were computed, not cached.",
        LENGTHS,
    ),
    "request_params_max_tokens": ("The max_tokens of each output.", LENGTHS),
    "request_params_n": ("The n of each API request.", NUMBERS),
    "event_loop_lag_seconds": (
        "Seconds by which the HTTP server's event loop is late, sampled 20 times a second.",
        LAG_SECONDS,
    ),
    "iteration_tokens_total": ("Tokens computed in an engine step.", STEP_TOKENS),
}


class Metrics:
    """All metrics of one model. Use them on the server's event loop only."""

    def __init__(self, model_name: str, prefix: str = "qserve") -> None:
        self._prefix = prefix
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        # A folder's name may contain bytes that are not UTF-8.
        self._model = model_name.encode(errors="replace").decode()
        self._report = EngineReport()
        is_vllm = prefix == "vllm"
        nothing = ("Always 0.", lambda r: 0)
        older = {old: GAUGES.get(name, nothing) for old, name in OLD_GAUGES.items()}
        older = older if is_vllm else {}
        for name, (text, read) in (GAUGES | older).items():
            gauge = self._make(Gauge, name, text)
            gauge.set_function(lambda read=read: read(self._report))
        self._counters = {name: self._make(Counter, name, text) for name, text in COUNTERS.items()}
        self._older_counters = {
            name: self._make(Counter, old, COUNTERS[name])
            for old, name in (OLD_COUNTERS.items() if is_vllm else ())
        }
        self._histograms = {
            name: self._make(Histogram, name, text, buckets=bounds)
            for name, (text, bounds) in HISTOGRAMS.items()
        }
        self._older_histograms = {
            name: self._make(Histogram, old, HISTOGRAMS[name][0], buckets=HISTOGRAMS[name][1])
            for old, name in (OLD_HISTOGRAMS.items() if is_vllm else ())
        }
        finished = Counter(
            f"{self._prefix}:request_success",
            "Finished outputs, by reason; abort: the client disconnected.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(self._model, reason) for reason in REASONS}
        rejected = Counter(
            f"{self._prefix}:admission_rejections",
            "Requests refused with 503 because the server was full, by the limit that was reached.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self._rejected = [rejected.labels(self._model, reason) for reason in REJECTIONS]
        waiting = Gauge(
            f"{self._prefix}:num_requests_waiting_by_reason",
            "Outputs waiting in the engine's queue, by reason.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        # Outputs in the queue wait for a slot or for KV pages.
        waiting.labels(self._model, "capacity").set_function(lambda: self._report.num_waiting)
        self._accepted = Counter(
            f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position in the draft.",
            ["model_name", "position"],
            registry=self._registry,
        )
        self._responses = Counter(
            f"{self._prefix}:http_requests",
            "HTTP requests, by route and response status; 499: the client disconnected.",
            ["handler", "status"],
            registry=self._registry,
        )
        self._response_classes = Counter(
            "http_requests",
            "HTTP requests, by method, route and status class such as 2xx.",
            ["method", "status", "handler"],
            registry=self._registry,
        )

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def watch_admission(self, admission: Admission) -> None:
        """Add gauges of admitted outputs and tokens, read whenever the page is rendered."""
        for index, (name, text) in enumerate(ADMITTED.items()):
            self._make(Gauge, name, text).set_function(lambda i=index: admission.held[i])
        admission.on_rejection = lambda index: self._rejected[index].inc()

    def describe_cache(self, config: EngineConfig) -> None:
        """Add a gauge of 1 whose labels are the settings of the KV cache.

        Call this method after the first report, which has the number of pages.
        """
        labels = {
            "model_name": self._model,
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(self._report.num_pages),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
        }
        text = "Settings of the KV cache."
        name = f"{self._prefix}:cache_config_info"
        Gauge(name, text, list(labels), registry=self._registry).labels(**labels).set(1)

    def describe_adapters(self, max_loras: int) -> None:
        """Add vLLM's gauge of running and waiting adapters, read from the last report."""
        self._registry.register(_AdaptersInfo(self._prefix, max_loras, lambda: self._report))

    async def watch_loop(self) -> None:
        """Sample the lag of the event loop until cancelled."""
        while True:
            due = time.perf_counter() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            lag = max(0.0, time.perf_counter() - due)
            self._histograms["event_loop_lag_seconds"].observe(lag)

    def count_restart(self) -> None:
        self._counters["engine_restarts"].inc()

    def take_report(self, report: EngineReport) -> None:
        """Update the metrics from the engine's report on a step."""
        self._report = report
        if report.num_step_tokens:
            self._histograms["iteration_tokens_total"].observe(report.num_step_tokens)
        if report.num_preempted:
            self._counters["num_preemptions"].inc(report.num_preempted)
        if report.num_prefix_queries:
            for counters in (self._counters, self._older_counters):
                if counters:
                    counters["prefix_cache_queries"].inc(report.num_prefix_queries)
                    counters["prefix_cache_hits"].inc(report.num_prefix_hits)
        if report.num_external_queries or report.num_external_hits:
            self._counters["external_prefix_cache_queries"].inc(report.num_external_queries)
            self._counters["external_prefix_cache_hits"].inc(report.num_external_hits)
        if any(report.drafts):
            drafts, tokens, *accepted = report.drafts
            self._counters["spec_decode_num_drafts"].inc(drafts)
            self._counters["spec_decode_num_draft_tokens"].inc(tokens)
            self._counters["spec_decode_num_accepted_tokens"].inc(sum(accepted))
            for position, count in enumerate(accepted):
                self._accepted.labels(self._model, str(position)).inc(count)
        for seconds in report.queue_seconds:
            self._histograms["request_queue_time_seconds"].observe(seconds)

    def output(
        self, arrived: float, num_prompt_tokens: int, max_tokens: int | None
    ) -> "OutputMeter":
        """Return the meter of one output: a context manager around its lifetime."""
        if max_tokens is not None:
            self._histograms["request_params_max_tokens"].observe(max_tokens)
        return OutputMeter(self, arrived, num_prompt_tokens)

    def count_request(self, n: int) -> None:
        """Count an API request that was admitted."""
        self._histograms["request_params_n"].observe(n)

    def count_longest(self, num_tokens: int) -> None:
        """Count an API request whose outputs all finished."""
        self._histograms["request_max_num_generation_tokens"].observe(num_tokens)

    def count_response(self, method: str, handler: str, status: int) -> None:
        """Count a reply in our metric, and in that of prometheus-fastapi-instrumentator."""
        self._responses.labels(handler, str(status)).inc()
        method = method if method in METHODS else "other"
        self._response_classes.labels(method, f"{status // 100}xx", handler).inc()

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram in HISTOGRAMS, and to its copy under the older name."""
        self._histograms[name].observe(value)
        if name in self._older_histograms:
            self._older_histograms[name].observe(value)

    def _make(self, kind: type, name: str, text: str, **options: object) -> object:
        metric = kind(
            f"{self._prefix}:{name}", text, ["model_name"], registry=self._registry, **options
        )
        return metric.labels(self._model)


class _AdaptersInfo(Collector):
    """Gauge with a single series, whose labels name the current adapters."""

    def __init__(self, prefix: str, max_loras: int, report: Callable[[], EngineReport]) -> None:
        self._name, self._max_loras, self._report = (
            f"{prefix}:lora_requests_info",
            max_loras,
            report,
        )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        report = self._report()
        text = "Running adapters, and adapters that outputs wait for; the value is the time."
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(self._name, text, labels=labels)
        names = (",".join(report.running_adapters), ",".join(report.waiting_adapters))
        family.add_metric([str(self._max_loras), *names], time.time())
        yield family


class OutputMeter:
    """Measures the times of one output, and counts the output when it ends.

    Use it as a context manager. If the block ends early, the output counts as aborted, unless
    `reason` was set before.
    """

    def __init__(self, metrics: Metrics, arrived: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived, self._num_prompt_tokens = arrived, num_prompt_tokens
        self._first: float | None = None  # arrival time of the first token
        self._last: float | None = None  # arrival time of the latest token
        self._num_tokens = 0
        self._facts = RequestFacts()
        self.reason = "abort"  # one of REASONS

    def take(self, event: TokenEvent) -> None:
        """Record an event of the engine. Call this method when the event arrives."""
        count = len(event.token_ids)
        if not count:
            if event.pooled:  # a pooling request has no tokens, so count its prompt here
                self._count_prompt(event)
            return
        now, metrics = time.perf_counter(), self._metrics
        metrics._counters["generation_tokens"].inc(count)
        self._num_tokens += count
        self._facts = event.facts
        if self._last is None:
            self._count_prompt(event)
            metrics._histograms["time_to_first_token_seconds"].observe(now - self._arrived)
            count -= 1
            self._first = self._last = now
        for _ in range(count):
            metrics.observe("inter_token_latency_seconds", (now - self._last) / count)
        self._last = now

    def _count_prompt(self, event: TokenEvent) -> None:
        self._metrics._counters["prompt_tokens"].inc(self._num_prompt_tokens)
        self._metrics._counters["prompt_tokens_cached"].inc(event.facts.num_cached)

    def __enter__(self) -> "OutputMeter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):  # not CancelledError or GeneratorExit
            self.reason = "error"
        self._metrics._finished[self.reason].inc()
        if self.reason in ("stop", "length") and self._last is not None:
            self._observe_whole()

    def _observe_whole(self) -> None:
        """Add a finished output to the histograms."""
        latency, decode = self._last - self._arrived, self._last - self._first
        # The engine's clock starts at submission, shortly after the request's arrival.
        inference = max(0.0, latency - self._facts.queue_seconds)
        computed = self._num_prompt_tokens - self._facts.num_cached
        seen = {
            "e2e_request_latency_seconds": latency,
            "request_decode_time_seconds": decode,
            "request_inference_time_seconds": inference,
            "request_prefill_time_seconds": max(0.0, inference - decode),
            "request_prompt_tokens": self._num_prompt_tokens,
            "request_generation_tokens": self._num_tokens,
            "request_num_preemptions": self._facts.num_preemptions,
            "request_prefill_kv_computed_tokens": computed,
        }
        if self._num_tokens > 1:
            seen["request_time_per_output_token_seconds"] = decode / (self._num_tokens - 1)
        for name, value in seen.items():
            self._metrics._histograms[name].observe(value)
