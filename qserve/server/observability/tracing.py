"""OpenTelemetry tracing: one span per request that runs on the engine.

Names follow vLLM's. OpenTelemetry is an optional dependency (extra `tracing`), imported only if
--otlp-traces-endpoint is set.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from formats.errors import InputError
from qserve.server.http.errors import ApiError
from qserve.server.requests.job import Job

FLAG = "--otlp-traces-endpoint"
SPAN = "llm_request"
# request headers that carry the trace context
HEADERS = ("traceparent", "tracestate")


class RequestSpan:
    """Span of a running request. Without a span, the methods do nothing."""

    def __init__(self, span: Any = None, started: float = 0.0) -> None:
        self._span, self._started = span, started
        self._first = self._last = 0.0  # seconds from the start to the first and the latest token
        self._queue_seconds = 0.0
        self.num_tokens = 0  # generated so far

    def take(self, num_tokens: int, queue_seconds: float) -> None:
        """Count tokens that are about to be sent. `queue_seconds`: time in the engine's queue."""
        if self._span is None or not num_tokens:
            return
        self._last = time.perf_counter() - self._started
        if not self.num_tokens:
            self._first, self._queue_seconds = self._last, queue_seconds
        self.num_tokens += num_tokens

    def end(self) -> None:
        """Set the counts and latencies, and end the span."""
        if self._span is None:
            return
        found = {"usage.completion_tokens": self.num_tokens}
        if self.num_tokens:
            queued = min(self._queue_seconds, self._first)
            found |= {
                "latency.time_to_first_token": self._first,
                "latency.time_in_queue": queued,
                "latency.time_in_model_prefill": self._first - queued,
                "latency.time_in_model_decode": self._last - self._first,
                "latency.time_in_model_inference": self._last - queued,
            }
        found["latency.e2e"] = time.perf_counter() - self._started
        for name, value in found.items():
            self._span.set_attribute(f"gen_ai.{name}", value)
        self._span.end()


class Tracing:
    """Creates and exports spans. `close` exports the rest."""

    def __init__(self, provider: Any = None) -> None:
        """`provider`: a TracerProvider; None: tracing is off."""
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("qserve")

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    @contextmanager
    def request(self, job: Job, model: str) -> Iterator[RequestSpan]:
        """Open the span of a request, and end it after the `with` block."""
        if self._tracer is None:
            yield RequestSpan()
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        age = time.perf_counter() - job.arrival.time
        span = self._tracer.start_span(
            SPAN,
            context=TraceContextTextMapPropagator().extract(job.arrival.trace_headers),
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - int(age * 1e9),
            attributes=_attributes(job, model),
        )
        counted = RequestSpan(span, job.arrival.time)
        try:
            yield counted
        except (GeneratorExit, asyncio.CancelledError):
            span.set_status(Status(StatusCode.ERROR, "the client disconnected"))
            raise
        except Exception as error:
            # The text of other errors may contain private data.
            reason = error.message if isinstance(error, ApiError) else type(error).__name__
            span.set_status(Status(StatusCode.ERROR, reason))
            raise
        finally:
            counted.end()

    def close(self) -> None:
        """Export the remaining spans. This takes at most a few seconds."""
        if self._provider is not None:
            self._provider.shutdown()


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the request headers that carry the trace context."""
    return {name: headers[name] for name in HEADERS if name in headers}


def tracing_to(endpoint: str | None) -> Tracing:
    """Return a Tracing that exports to a collector; None: tracing is off. Raises InputError."""
    if endpoint is None:
        return Tracing()
    if not endpoint.startswith(("http://", "https://")):
        raise InputError(
            FLAG,
            f"expected a URL such as http://host:4318/v1/traces, found {endpoint!r:.200}",
            "give the address of an OTLP collector, with its scheme",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InputError(
            FLAG,
            f"needs OpenTelemetry's SDK and its OTLP exporter for HTTP ({error.name} is missing)",
            "pip install 'qserve-kit[tracing]'",
        ) from error
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence, as usual.
    named = OTELResourceDetector().detect()
    resource = Resource.create({SERVICE_NAME: "qserve"}).merge(named)
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)


def _attributes(job: Job, model: str) -> dict[str, Any]:
    found = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": job.request_id,
        "gen_ai.usage.prompt_tokens": job.num_prompt_tokens,
    }
    if job.params:
        params = job.params[0]
        found |= {
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
    return {name: value for name, value in found.items() if value is not None}
