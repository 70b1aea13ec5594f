"""Metrics: what the server and its engine did, as Prometheus reads it. Knows no text of users.

Names are vLLM's where the meaning is, with our prefix. Labels hold the served model's name, routes
of the table, statuses and reasons of ours: none can grow with what clients send.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from qserve.engine.report import EngineReport
from qserve.engine.request import RequestEvent
from qserve.server.admission import Admission

REASONS = ("stop", "length", "abort", "error")

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
    "prompt_tokens": "Prompt tokens of outputs that got a token, once for each output.",
    "generation_tokens": "Tokens that the engine made.",
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
        for name, (text, read) in GAUGES.items():
            gauge = self._make(Gauge, name, text)
            gauge.set_function(lambda read=read: read(self._report))
        self._counters = {name: self._make(Counter, name, text) for name, text in COUNTERS.items()}
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
            self._counters["prefix_cache_queries"].inc(report.num_prefix_queries)
            self._counters["prefix_cache_hits"].inc(report.num_prefix_hits)
        for seconds in report.queue_seconds:
            self._histograms["request_queue_time_seconds"].observe(seconds)

    def output(self, arrived: float, num_prompt_tokens: int) -> "OutputMeter":
        """The meter of one output, as a context manager around its life."""
        return OutputMeter(self, arrived, num_prompt_tokens)

    def count_response(self, handler: str, status: int) -> None:
        self._responses.labels(handler, str(status)).inc()

    def _make(self, kind: type, name: str, text: str, **options: object) -> object:
        metric = kind(
            f"{self._prefix}:{name}", text, ["model_name"], registry=self._registry, **options
        )
        return metric.labels(self._model)


class OutputMeter:
    """Times one output of the engine, and counts it once when it ends, however that is.

    An output that is left early was aborted, unless `reason` says otherwise by then.
    """

    def __init__(self, metrics: Metrics, arrived: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived, self._num_prompt_tokens = arrived, num_prompt_tokens
        self._last: float | None = None  # when the last token came
        self.reason = "abort"  # one of REASONS

    def take(self, event: RequestEvent) -> None:
        """Take an event of the engine, when it arrives."""
        count = len(event.token_ids)
        if not count:
            return
        now, metrics = time.perf_counter(), self._metrics
        metrics._counters["generation_tokens"].inc(count)
        if self._last is None:
            metrics._counters["prompt_tokens"].inc(self._num_prompt_tokens)
            metrics._histograms["time_to_first_token_seconds"].observe(now - self._arrived)
            count -= 1
            self._last = now
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
            latency = self._last - self._arrived
            self._metrics._histograms["e2e_request_latency_seconds"].observe(latency)
