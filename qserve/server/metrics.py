"""Metrics: what the server and its engine did, as Prometheus reads it. Knows no text of users.

Names are vLLM's where the meaning is, with our prefix. Labels hold the served model's name, routes
of the table, statuses and reasons of ours: none can grow with what clients send.
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
from qserve.engine.request import RequestEvent
from qserve.server.admission import Admission

REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("outputs", "prompt_tokens")  # in the order of what Admission holds

# of the engine's last report
GAUGES: dict[str, tuple[str, Callable[[EngineReport], float]]] = {
    "num_requests_running": ("Outputs that the engine computes.", lambda r: r.num_running),
    "num_requests_waiting": ("Outputs in the engine's queue.", lambda r: r.num_waiting),
    "num_tokens_waiting": (
        "Tokens that the waiting outputs have to compute first.",
        lambda r: r.num_waiting_tokens,
    ),
    "kv_cache_pages": ("KV pages that there are.", lambda r: r.num_pages),
    "kv_cache_pages_used": ("KV pages in use.", lambda r: r.num_pages_used),
    "kv_cache_usage_perc": (
        "Share of the KV pages in use; 1 is all.",
        lambda r: r.num_pages_used / max(1, r.num_pages),
    ),
}
# vLLM's older names, which its production stack still reads -> ours; with the prefix vllm alone
OLD_GAUGES = {"gpu_cache_usage_perc": "kv_cache_usage_perc"}
OLD_COUNTERS = {
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
}
# of what Admission holds, in its order
ADMITTED = {
    "num_requests_admitted": "Outputs under way, which --max-num-queued-reqs limits.",
    "num_prompt_tokens_admitted": "Their prompts' tokens, which --max-num-queued-tokens limits.",
}
COUNTERS = {
    "engine_restarts": "Times that the engine was started again after its end.",
    "num_preemptions": "Times that an output gave its KV pages back, to be computed again.",
    "prefix_cache_queries": "Tokens that were looked for in the prefix cache.",
    "prefix_cache_hits": "Tokens that were found there, and so were not computed.",
    "external_prefix_cache_queries": "Tokens that were looked for in other engines' KV pages.",
    "external_prefix_cache_hits": "Tokens whose KV pages came from there.",
    "prompt_tokens": "Prompt tokens of outputs that got a token, once for each output.",
    "generation_tokens": "Tokens that the engine made.",
    "spec_decode_num_drafts": "Verifies of drafts, one for each output and step.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that became output.",
}
# Bounds in seconds. Between tokens there are some milliseconds; a whole request may take an hour.
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
        "From a request's arrival to the first token of each of its outputs.",
        REQUEST_SECONDS,
    ),
    "inter_token_latency_seconds": ("From each token of an output to its next.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": (
        "From a request's arrival to the last token of each output that came to its end.",
        REQUEST_SECONDS,
    ),
    "request_queue_time_seconds": ("From the server to an output's first step.", REQUEST_SECONDS),
    "request_prefill_time_seconds": (
        "From an output's first step to its first token.",
        REQUEST_SECONDS,
    ),
    "request_decode_time_seconds": ("From an output's first token to its last.", REQUEST_SECONDS),
    "request_inference_time_seconds": (
        "From an output's first step to its last token.",
        REQUEST_SECONDS,
    ),
    "request_time_per_output_token_seconds": (
        "The mean of an output's times from a token to its next.",
        TOKEN_SECONDS,
    ),
    "request_prompt_tokens": ("Prompt tokens of each output that came to its end.", LENGTHS),
    "request_generation_tokens": ("Tokens of each output that came to its end.", LENGTHS),
    "request_max_num_generation_tokens": (
        "Tokens of the longest output of each API request whose outputs all came to their end.",
        LENGTHS,
    ),
    "request_params_max_tokens": ("The limit of each output's tokens.", LENGTHS),
    "request_params_n": ("The n of each API request.", NUMBERS),
    "event_loop_lag_seconds": (
        "How late the HTTP server's event loop runs what is due, sampled 20 times a second.",
        LAG_SECONDS,
    ),
    "iteration_tokens_total": ("Tokens that an engine step computed.", STEP_TOKENS),
}


class Metrics:
    """All metrics of one server. Used on its event loop alone."""

    def __init__(self, model_name: str, prefix: str = "qserve") -> None:
        self._prefix = prefix
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        # A folder's name may have bytes that are no text.
        self._model = model_name.encode(errors="replace").decode()
        self._report = EngineReport()
        is_vllm = prefix == "vllm"
        older = {old: GAUGES[name] for old, name in OLD_GAUGES.items()} if is_vllm else {}
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
        finished = Counter(
            f"{self._prefix}:request_success",
            "Outputs that ended, by reason; abort: the client left.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(self._model, reason) for reason in REASONS}
        rejected = Counter(
            f"{self._prefix}:admission_rejections",
            "Requests that got 503 because too much was under way, by what was too much.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self._rejected = [rejected.labels(self._model, reason) for reason in REJECTIONS]
        waiting = Gauge(
            f"{self._prefix}:num_requests_waiting_by_reason",
            "Outputs in the engine's queue, by what they wait for.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        # Whoever waits here waits for a place or for KV pages.
        waiting.labels(self._model, "capacity").set_function(lambda: self._report.num_waiting)
        self._accepted = Counter(
            f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that became output, by their position in the draft.",
            ["model_name", "position"],
            registry=self._registry,
        )
        self._responses = Counter(
            f"{self._prefix}:http_requests",
            "HTTP requests by the route and the status of their answer; 499: the client left.",
            ["handler", "status"],
            registry=self._registry,
        )

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def watch_admission(self, admission: Admission) -> None:
        """Show what is admitted, whenever the page is made."""
        for index, (name, text) in enumerate(ADMITTED.items()):
            self._make(Gauge, name, text).set_function(lambda i=index: admission.held[i])
        admission.on_rejection = lambda index: self._rejected[index].inc()

    def describe_cache(self, config: EngineConfig) -> None:
        """Show the settings of the KV pages, once there are some, as labels of a gauge of 1."""
        labels = {
            "model_name": self._model,
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(self._report.num_pages),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
        }
        text = "The settings of the KV pages."
        name = f"{self._prefix}:cache_config_info"
        Gauge(name, text, list(labels), registry=self._registry).labels(**labels).set(1)

    def describe_adapters(self, max_loras: int) -> None:
        """Show which adapters run and are waited for, of the last report, as vLLM does."""
        self._registry.register(_AdaptersInfo(self._prefix, max_loras, lambda: self._report))

    async def watch_loop(self) -> None:
        """Sample how late the event loop is, until it is cancelled."""
        while True:
            due = time.perf_counter() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            lag = max(0.0, time.perf_counter() - due)
            self._histograms["event_loop_lag_seconds"].observe(lag)

    def count_restart(self) -> None:
        self._counters["engine_restarts"].inc()

    def take_report(self, report: EngineReport) -> None:
        """Take what the engine tells after a step."""
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
        """The meter of one output, as a context manager around its life."""
        if max_tokens is not None:
            self._histograms["request_params_max_tokens"].observe(max_tokens)
        return OutputMeter(self, arrived, num_prompt_tokens)

    def count_request(self, n: int) -> None:
        """Count an API request that was admitted."""
        self._histograms["request_params_n"].observe(n)

    def count_longest(self, num_tokens: int) -> None:
        """Count an API request whose outputs all came to their end."""
        self._histograms["request_max_num_generation_tokens"].observe(num_tokens)

    def count_response(self, handler: str, status: int) -> None:
        self._responses.labels(handler, str(status)).inc()

    def _make(self, kind: type, name: str, text: str, **options: object) -> object:
        metric = kind(
            f"{self._prefix}:{name}", text, ["model_name"], registry=self._registry, **options
        )
        return metric.labels(self._model)


class _AdaptersInfo(Collector):
    """A gauge of one series, whose labels are what is true now: names do not pile up."""

    def __init__(self, prefix: str, max_loras: int, report: Callable[[], EngineReport]) -> None:
        self._name, self._max_loras, self._report = (
            f"{prefix}:lora_requests_info",
            max_loras,
            report,
        )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        report = self._report()
        text = "Adapters that run, and that outputs wait for; the value is the time."
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(self._name, text, labels=labels)
        names = (",".join(report.running_adapters), ",".join(report.waiting_adapters))
        family.add_metric([str(self._max_loras), *names], time.time())
        yield family


class OutputMeter:
    """Times one output of the engine, and counts it once when it ends, however that is.

    An output that is left early was aborted, unless `reason` says otherwise by then.
    """

    def __init__(self, metrics: Metrics, arrived: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived, self._num_prompt_tokens = arrived, num_prompt_tokens
        self._first: float | None = None  # when the first token came
        self._last: float | None = None  # when the last token came
        self._num_tokens = 0
        self._queue_seconds = 0.0
        self.reason = "abort"  # one of REASONS

    def take(self, event: RequestEvent) -> None:
        """Take an event of the engine, when it arrives."""
        count = len(event.token_ids)
        if not count:
            if event.pooled:  # no token will come to count its prompt with
                self._metrics._counters["prompt_tokens"].inc(self._num_prompt_tokens)
            return
        now, metrics = time.perf_counter(), self._metrics
        metrics._counters["generation_tokens"].inc(count)
        self._num_tokens += count
        if self._last is None:
            metrics._counters["prompt_tokens"].inc(self._num_prompt_tokens)
            metrics._histograms["time_to_first_token_seconds"].observe(now - self._arrived)
            count -= 1
            self._first = self._last = now
            self._queue_seconds = event.queue_seconds
        for _ in range(count):
            metrics._histograms["inter_token_latency_seconds"].observe((now - self._last) / count)
        self._last = now

    def __enter__(self) -> "OutputMeter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):  # being cancelled or closed is none
            self.reason = "error"
        self._metrics._finished[self.reason].inc()
        if self.reason in ("stop", "length") and self._last is not None:
            self._observe_whole()

    def _observe_whole(self) -> None:
        """Observe an output that came to its end."""
        latency, decode = self._last - self._arrived, self._last - self._first
        # The engine's time begins when it is sent there, shortly after it has arrived.
        inference = max(0.0, latency - self._queue_seconds)
        seen = {
            "e2e_request_latency_seconds": latency,
            "request_decode_time_seconds": decode,
            "request_inference_time_seconds": inference,
            "request_prefill_time_seconds": max(0.0, inference - decode),
            "request_prompt_tokens": self._num_prompt_tokens,
            "request_generation_tokens": self._num_tokens,
        }
        if self._num_tokens > 1:
            seen["request_time_per_output_token_seconds"] = decode / (self._num_tokens - 1)
        for name, value in seen.items():
            self._metrics._histograms[name].observe(value)
