"""Tracing: a span of OpenTelemetry for each request that generates, where an endpoint is given.

Names follow vLLM's. The packages are an extra (`tracing`), imported where the flag asks for them.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from formats.errors import InputError
from qserve.server.errors import ApiError
from qserve.server.job import Job

FLAG = "--otlp-traces-endpoint"
SPAN = "llm_request"
# the headers by which a client says to which trace its request belongs
HEADERS = ("traceparent", "tracestate")


class RequestSpan:
    """One request's span while it runs. Without a tracer nothing is recorded."""

    def __init__(self, span: Any = None, started: float = 0.0) -> None:
        self._span, self._started = span, started
        self._has_begun = False
        self.num_tokens = 0  # generated so far

    def take(self, num_tokens: int) -> None:
        """Count tokens of an answer, when they are about to be sent."""
        self.num_tokens += num_tokens
        if self._span is not None and num_tokens and not self._has_begun:
            self._has_begun = True
            elapsed = time.perf_counter() - self._started
            self._span.set_attribute("gen_ai.latency.time_to_first_token", elapsed)


class Tracing:
    """Makes spans and sends them. `close` sends what is left."""

    def __init__(self, provider: Any = None) -> None:
        """`provider`: a TracerProvider; None: nothing is traced."""
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("qserve")

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    @contextmanager
    def request(self, job: Job, model: str) -> Iterator[RequestSpan]:
        """The span of a request around its answer."""
        if self._tracer is None:
            yield RequestSpan()
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        age = time.perf_counter() - job.arrived
        span = self._tracer.start_span(
            SPAN,
            context=TraceContextTextMapPropagator().extract(job.trace_headers),
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - int(age * 1e9),
            attributes=_attributes(job, model),
        )
        counted = RequestSpan(span, job.arrived)
        try:
            yield counted
        except (GeneratorExit, asyncio.CancelledError):
            span.set_status(Status(StatusCode.ERROR, "the client left"))
            raise
        except Exception as error:
            # Others than these may hold what is no business of a collector.
            reason = error.message if isinstance(error, ApiError) else type(error).__name__
            span.set_status(Status(StatusCode.ERROR, reason))
            raise
        finally:
            span.set_attribute("gen_ai.usage.completion_tokens", counted.num_tokens)
            span.set_attribute("gen_ai.latency.e2e", time.perf_counter() - job.arrived)
            span.end()

    def close(self) -> None:
        """Send what has not been sent, for some seconds at most."""
        if self._provider is not None:
            self._provider.shutdown()


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's headers that name its trace."""
    return {name: headers[name] for name in HEADERS if name in headers}


def tracing_to(endpoint: str | None) -> Tracing:
    """Sends spans to a collector's address; None: to nobody. Raises InputError."""
    if endpoint is None:
        return Tracing()
    if not endpoint.startswith(("http://", "https://")):
        raise InputError(FLAG, f"expected a URL such as http://host:4318/v1/traces: {endpoint}")
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
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes first, as everywhere.
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
