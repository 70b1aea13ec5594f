"""The dashboard and the alert rules name only metrics that a server has."""

import asyncio
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from qserve.config import EngineConfig, ServerConfig
from qserve.engine.ipc.client import _Output
from qserve.engine.token_event import RequestFacts, TokenEvent
from qserve.server.observability import tracing
from qserve.server.observability.metrics import Metrics

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "observability"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("maker", FOLDER / "make_dashboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What vLLM's public dashboards read: that of its Prometheus example, of 2024 and of today, and
# "Performance Statistics" and "Query Statistics" of its Grafana example.
OF_VLLMS_DASHBOARDS = {
    *(f"e2e_request_latency_seconds_{end}" for end in ("bucket", "sum", "count")),
    *(f"time_to_first_token_seconds_{end}" for end in ("bucket", "sum", "count")),
    *(f"time_per_output_token_seconds_{end}" for end in ("bucket", "sum", "count")),
    *(f"inter_token_latency_seconds_{end}" for end in ("bucket", "sum", "count")),
    *("prompt_tokens_total", "generation_tokens_total", "iteration_tokens_total_count"),
    *("num_requests_running", "num_requests_waiting", "num_requests_swapped"),
    *("gpu_cache_usage_perc", "cpu_cache_usage_perc", "kv_cache_usage_perc"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_success_total", "request_queue_time_seconds_sum"),
    *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    *("request_max_num_generation_tokens_sum", "request_max_num_generation_tokens_bucket"),
    *("prompt_tokens_cached_total", "request_num_preemptions_bucket", "num_preemptions_total"),
}


def names_of(prefix: str) -> set[str]:
    metrics = Metrics("m", prefix)
    metrics.describe_cache(EngineConfig(model="m"))
    found = set()
    for family in text_string_to_metric_families(metrics.page().decode()):
        ends = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("_total", "")
        found |= {family.name + end for end in ends}
    return found


def named(text: str, prefix: str) -> set[str]:
    return set(re.findall(rf"{prefix}:\w+", text))


@pytest.mark.parametrize("prefix", ["qserve", "vllm"])
def test_dashboard_metrics_exist(maker, prefix):
    found = named(json.dumps(maker.dashboard(prefix)), prefix)
    assert len(found) > 20 and found <= names_of(prefix)


def test_vllm_dashboard_metrics_exist(make_server):
    server = make_server(ServerConfig(served_model_name=["tiny"], metrics_prefix="vllm"))
    server.complete(prompt=[5] * 9, max_tokens=4)
    server.get("/metrics")
    text = server.get("/metrics").text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[:1] != "#"}
    assert {f"vllm:{name}" for name in OF_VLLMS_DASHBOARDS} <= names
    seen = {"request_success_total", "e2e_request_latency_seconds_count", "http_requests_total"}
    lines = [line for line in text.splitlines() if not line.endswith(" 0.0")]
    for name in seen:
        assert any(line.startswith((f"vllm:{name}{{", f"{name}{{")) for line in lines), name
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text
    of_model = [line for line in lines if line.startswith("vllm:request_success_total{")]
    assert of_model == [
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0'
    ]


class RecordedSpan:
    """Keeps what a span of OpenTelemetry would send."""

    def __init__(self) -> None:
        self.found, self.has_ended = {}, False

    def set_attribute(self, name, value):
        self.found[name.removeprefix("gen_ai.")] = value

    def end(self):
        self.has_ended = True


def test_span_latencies_sum_to_total(monkeypatch):
    """1 s in the queue, 2 s of prompt, 3 s of 4 tokens, and 1 s until the reply has been read."""
    clock = iter([103.0, 105.0, 106.0, 107.0])
    monkeypatch.setattr(tracing.time, "perf_counter", lambda: next(clock))
    recorded = RecordedSpan()
    span = tracing.RequestSpan(recorded, 100.0)
    span.take(1, 1.0)
    span.take(0, 0.0)
    span.take(2, 1.0)
    span.take(1, 1.0)
    span.end()
    assert recorded.has_ended and recorded.found == {
        "usage.completion_tokens": 4,
        "latency.time_to_first_token": 3.0,
        "latency.time_in_queue": 1.0,
        "latency.time_in_model_prefill": 2.0,
        "latency.time_in_model_decode": 3.0,
        "latency.time_in_model_inference": 5.0,
        "latency.e2e": 7.0,
    }


def test_span_has_queue_time(server, monkeypatch):
    queue_times = []
    take = tracing.RequestSpan.take
    monkeypatch.setattr(
        tracing.RequestSpan,
        "take",
        lambda span, count, queued: (queue_times.append(queued), take(span, count, queued)),
    )
    generate = server.client.generate

    async def queued(*arguments, **options):
        async for event in generate(*arguments, **options):
            yield event._replace(facts=RequestFacts(queue_seconds=0.25))

    server.client.generate = queued
    server.complete(max_tokens=3)
    assert len(queue_times) == 3 and set(queue_times) == {0.25}


def test_merged_events_keep_metric_and_span_fields():
    later = RequestFacts(queue_seconds=0.5, num_preemptions=2)

    async def merged() -> TokenEvent:
        output = _Output()
        event = TokenEvent(request_id="r", token_ids=(5,), facts=RequestFacts(queue_seconds=0.5))
        output.put(event)
        output.put(event._replace(token_ids=(6,), facts=later, finish_reason="stop"))
        return await output.take()

    found = asyncio.run(merged())
    assert (found.token_ids, found.facts) == ((5, 6), later)


def test_dashboard_file_equals_generated(maker):
    assert json.loads((FOLDER / "grafana.json").read_text()) == maker.dashboard("qserve")


def test_queries_have_balanced_brackets(maker):
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    queries = [rule["expr"] for rule in rules]
    queries += [t["expr"] for p in maker.dashboard("qserve")["panels"] for t in p["targets"]]
    for query in queries:
        for pair in ("()", "[]", "{}"):
            assert query.count(pair[0]) == query.count(pair[1]), query


def test_alert_metrics_exist():
    text = (FOLDER / "alerts.yaml").read_text()
    found = named(text, "qserve")
    assert len(found) > 6 and found <= names_of("qserve")
    for rule in yaml.safe_load(text)["groups"][0]["rules"]:
        assert {"alert", "expr", "annotations"} <= set(rule)
