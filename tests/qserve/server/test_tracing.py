"""OpenTelemetry: the span of each request, in a collector in memory."""

import sys

import pytest

from formats.errors import InputError
from qserve.config import ServerConfig
from qserve.server.app import build_app
from qserve.server.observability.tracing import Tracing, tracing_to
from tests.qserve.server.conftest import Server

sdk = pytest.importorskip("opentelemetry.sdk.trace")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced(tokenizer):
    """A server, and a function that gives the spans so far."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = ServerConfig(served_model_name=["tiny"])
    server = Server(tokenizer, config)
    server.app = build_app(
        server.client, tokenizer, config, max_num_seqs=8, tracing=Tracing(provider)
    )
    return server, exporter.get_finished_spans


def test_request_span_joins_client_trace(traced):
    server, spans = traced
    reply = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "temperature": 0.5},
        headers={"traceparent": PARENT},
    )
    (span,) = spans()
    assert (span.name, span.kind.name, span.status.status_code.name) == (
        *("llm_request", "SERVER", "UNSET"),
    )
    assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(span.parent.span_id, "016x") == PARENT.split("-")[2]
    usage, found = reply.json()["usage"], span.attributes
    assert found["gen_ai.request.id"] == reply.json()["id"]
    assert found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert (found["gen_ai.request.n"], found["gen_ai.request.temperature"]) == (2, 0.5)
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert span.end_time - span.start_time > 0


def test_streams_failures_and_vectors(traced, chunks):
    server, spans = traced
    chunks(server.complete(stream=True))
    server.client.fails_at = 1
    assert server.complete().status_code == 500
    ended, failed = spans()
    assert ended.attributes["gen_ai.usage.completion_tokens"] > 3 and ended.parent is None
    assert failed.status.status_code.name == "ERROR"
    assert "secret" not in failed.status.description
    assert server.complete(temperature=9).status_code == 400  # never ran
    assert len(spans()) == 2


@pytest.mark.parametrize("package", ["opentelemetry.sdk.trace", "opentelemetry.exporter"])
def test_without_the_packages_the_flag_is_refused(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp", None)
    with pytest.raises(InputError, match=r"--otlp-traces-endpoint.*qserve-kit\[tracing\]"):
        tracing_to("http://localhost:4318/v1/traces")


def test_invalid_otlp_endpoint_is_refused():
    with pytest.raises(InputError, match="expected a URL"):
        tracing_to("localhost:4317")
    assert not tracing_to(None).is_on
