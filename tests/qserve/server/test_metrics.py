"""GET /metrics: exact counts of scripted requests, labels that cannot grow, a page that parses."""

import asyncio
import json
import re
import socket
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qserve.config import EngineConfig, ServerConfig
from qserve.engine.report import EngineReport
from qserve.engine.token_event import RequestFacts, TokenEvent
from qserve.server.observability.metrics import GAUGES, HISTOGRAMS, Metrics
from qserve.server.openai import generation
from qserve.server.requests.completions import completion_job
from qserve.server.requests.job import Arrival

COMPLETIONS = "/v1/completions"


def parse(text: str) -> dict[str, float]:
    """Samples by name and labels, without the model's name: `http_requests_total 200 /health`."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [
                v for k, v in sorted(sample.labels.items(), reverse=True) if k != "model_name"
            ]
            key = " ".join([sample.name.removeprefix("qserve:"), *labels])
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples


@pytest.fixture
def read(server):
    return lambda: parse(server.get("/metrics").text)


def ended(samples: dict) -> dict[str, float]:
    found = {k.split()[1]: v for k, v in samples.items() if k.startswith("request_success_total")}
    return {reason: count for reason, count in found.items() if count}


def counts(samples: dict) -> dict[str, float]:
    """How much each histogram of requests has seen."""
    names = {
        "time_to_first_token_seconds": "first",
        "inter_token_latency_seconds": "next",
        "e2e_request_latency_seconds": "whole",
    }
    return {short: samples[f"{name}_count"] for name, short in names.items()}


def until(condition, timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_page_is_prometheus_text_and_zero_at_first(server):
    reply = server.get("/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain; vers")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    ours = {name: family for name, family in families.items() if name.startswith("qserve:")}
    for name, family in ours.items():
        assert family.documentation and family.type in ("gauge", "counter", "histogram"), name
        for sample in family.samples:
            assert sample.value == 0 or sample.name.endswith("_created"), sample
            if "http_requests" not in name:
                assert sample.labels["model_name"] == "tiny"
    assert {f"qserve:{name}" for name in (*GAUGES, *HISTOGRAMS)} <= ours.keys()
    assert "process_open_fds" in families


@pytest.mark.parametrize("stream", [False, True])
def test_scripted_requests_give_exact_counts(server, read, stream):
    # 28 tokens and the end token, if the limit lets it come so far
    num_tokens = len(server.tokenizer.encode(server.client.text)) + 1
    assert num_tokens > 6
    server.complete(prompt=[5] * 9, max_tokens=4, stream=stream)
    server.complete(prompt=[5] * 3, max_tokens=200, stream=stream)
    server.complete(prompt=[[5] * 2, [5] * 7], n=3, max_tokens=6, stream=stream)
    server.complete(prompt=[5], max_tokens=1, stream=stream)
    usage = server.chat(max_tokens=5).json()["usage"]
    samples = read()
    generated = 4 + num_tokens + 6 * 6 + 1 + 5
    assert samples["prompt_tokens_total"] == 9 + 3 + 3 * (2 + 7) + 1 + usage["prompt_tokens"]
    assert samples["generation_tokens_total"] == generated
    assert ended(samples) == {"length": 1 + 6 + 1 + 1, "stop": 1}
    assert counts(samples) == {"first": 10, "next": generated - 10, "whole": 10}
    assert samples["http_requests_total 200 /v1/completions"] == 4
    assert samples["http_requests_total 200 /v1/chat/completions"] == 1
    assert samples["num_requests_admitted"] == samples["num_prompt_tokens_admitted"] == 0


def test_stop_string_is_a_stop_and_its_tokens_count(server, read):
    reply = server.complete(prompt=[5], stop="there", max_tokens=100).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    samples = read()
    assert ended(samples) == {"stop": 1}
    assert samples["generation_tokens_total"] == reply["usage"]["completion_tokens"]
    assert len(server.client.aborted) == 1  # in the engine, where it is no stop


def test_latencies_equal_token_times(server, read):
    server.client.delay = 0.03
    started = time.perf_counter()
    server.complete(max_tokens=5)
    took = time.perf_counter() - started
    samples = read()
    first, rest = (
        samples[f"{n}_seconds_sum"] for n in ("time_to_first_token", "inter_token_latency")
    )
    assert 0.03 <= first < took - 4 * 0.03
    assert 4 * 0.03 <= rest < took - first
    assert samples["e2e_request_latency_seconds_sum"] == pytest.approx(first + rest)
    assert samples["time_to_first_token_seconds_bucket 0.02"] == 0
    assert samples["time_to_first_token_seconds_bucket +Inf"] == 1


def test_tokens_of_one_event_share_its_time(monkeypatch):
    metrics, now = Metrics("tiny"), 8.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with metrics.output(now, 3, None) as meter:
        now = 9.0
        meter.take(TokenEvent(request_id="r", token_ids=(7,)))
        now = 9.25
        meter.take(TokenEvent(request_id="r", token_ids=(7, 7)))
    samples = parse(metrics.page().decode())
    assert counts(samples) == {"first": 1, "next": 2, "whole": 0}
    assert samples["time_to_first_token_seconds_sum"] == 1
    assert samples["inter_token_latency_seconds_sum"] == 0.25, "once for both, not for each"
    assert samples["inter_token_latency_seconds_bucket 0.01"] == 0
    assert ended(samples) == {"abort": 1}


def test_disconnect_after_last_chunk_is_not_an_abort(server, read):
    """The last chunk has been made, and the client goes without it."""

    async def leave_at_the_end() -> None:
        service = server.app.state.service
        job = completion_job(
            service.model,
            b'{"prompt": "a", "max_tokens": 3}',
            Arrival(time=time.perf_counter()),
        )
        async with aclosing(generation.deltas(service, "", job)) as deltas:
            async for _, delta in deltas:
                if delta.finish_reason:
                    break

    asyncio.run(leave_at_the_end())
    assert ended(read()) == {"length": 1}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("early", [False, True])  # before the first token
def test_disconnect_is_counted_once_per_output(server, live, n, stream, early):
    server.client.endless, server.client.delay = True, 60 if early else 0.01
    body = json.dumps({"prompt": [5] * 4, "stream": stream, "n": n, "max_tokens": 250}).encode()
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    metrics = server.app.state.service.metrics

    def read() -> dict[str, float]:
        return parse(metrics.page().decode())

    with socket.create_connection(("127.0.0.1", live)) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: len(server.client.running) == n)
        until(lambda: early or read()["generation_tokens_total"] >= 2 * n)
        assert read()["num_requests_admitted"] == n
        assert read()["num_prompt_tokens_admitted"] == 4 * n
        assert not ended(read())
    until(lambda: read()["num_requests_admitted"] == 0)
    samples = read()
    assert ended(samples) == {"abort": n}
    begun, generated = 0 if early else n, samples["generation_tokens_total"]
    assert samples["prompt_tokens_total"] == 4 * begun
    assert counts(samples) == {"first": begun, "next": generated - begun, "whole": 0}
    status = 200 if stream and not early else 499
    until(lambda: read().get(f"http_requests_total {status} /v1/completions") == 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("how", "status"), [("fails_at", 500), ("breaks_at", 500), ("dies_at", 503)]
)
@pytest.mark.parametrize("at", [0, 2])
def test_failures_are_errors(server, read, how, status, stream, at):
    setattr(server.client, how, at)
    server.complete(prompt=[5], stream=stream)
    samples = read()  # of a dead engine, too
    assert ended(samples) == {"error": 1}
    assert samples["generation_tokens_total"] == at
    assert samples["time_to_first_token_seconds_count"] == bool(at)
    assert samples["e2e_request_latency_seconds_count"] == 0
    status = 200 if stream and at else status
    assert samples[f"http_requests_total {status} /v1/completions"] == 1


def test_refusals_are_counted_by_route_and_status(make_server, monkeypatch):
    server = make_server(
        ServerConfig(served_model_name=["tiny"], api_key=["k"], max_num_queued_reqs=0)
    )
    key = {"Authorization": "Bearer k"}
    server.post(COMPLETIONS, {"prompt": "a"})
    server.get("/metrics")
    server.get("/health")
    server.get("/v1/models/tiny", headers=key)
    server.get("/v1/models/other", headers=key)
    server.get("/nothing", headers=key)
    server.get(COMPLETIONS, headers=key)
    server.post(COMPLETIONS, {"prompt": ""}, headers=key)
    server.post(COMPLETIONS, {"prompt": "a", "n": 8, "best_of": 2}, headers=key)
    server.client.refuses = True
    server.post(COMPLETIONS, {"prompt": "a"}, headers=key)
    server.client.is_alive = False
    server.post(COMPLETIONS, {"prompt": "a"}, headers=key)

    def explode(*arguments):
        raise RuntimeError("secret detail")

    server.client.is_alive = True
    monkeypatch.setattr(type(server.tokenizer), "render_chat", explode)
    server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, headers=key
    )
    text = server.get("/metrics", headers=key).text
    samples = parse("\n".join(line for line in text.splitlines() if "qserve:http" in line))
    name = "http_requests_total "
    assert {k.removeprefix(name): v for k, v in samples.items() if k.startswith(name)} == {
        "401 none": 2,
        "200 /health": 1,
        "200 /v1/models/{name:path}": 1,
        "404 /v1/models/{name:path}": 1,
        "404 none": 1,
        "405 /v1/completions": 1,
        "400 /v1/completions": 3,
        "503 /v1/completions": 1,
        "500 /v1/chat/completions": 1,
    }
    samples = parse(text)
    assert ended(samples) == {"error": 1}  # that which the engine refused
    assert samples["http_requests_total 4xx POST /v1/completions"] == 3
    assert samples["http_requests_total 5xx POST /v1/completions"] == 1
    assert samples["http_requests_total 4xx GET /v1/completions"] == 1
    assert samples["http_requests_total 2xx GET /health"] == 1
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 2.0' in text


def test_client_text_is_not_a_label(server, read):
    secret = "sesame"
    before = set(read())
    for path in (f"/{secret}", f"/v1/models/{secret}", f"/v1/{secret}?{secret}=1"):
        server.get(path, headers={"User-Agent": secret, "X-Request-Id": secret})
    for method in (secret.upper(), "PROPFIND"):
        server.request(method, COMPLETIONS)
    server.complete(model=secret, user=secret)
    server.complete(prompt=secret, user=secret, stop=[secret])
    after = read()
    assert secret not in " ".join(after).lower()
    new = [key for key in after.keys() - before if "_created" not in key]
    assert sorted(new) == [
        "http_requests_total 200 /metrics",
        "http_requests_total 200 /v1/completions",
        "http_requests_total 2xx GET /metrics",
        "http_requests_total 2xx POST /v1/completions",
        "http_requests_total 404 /v1/completions",
        "http_requests_total 404 /v1/models/{name:path}",
        "http_requests_total 404 none",
        "http_requests_total 405 /v1/completions",
        "http_requests_total 4xx GET /v1/models/{name:path}",
        "http_requests_total 4xx GET none",
        "http_requests_total 4xx POST /v1/completions",
        "http_requests_total 4xx other /v1/completions",
    ]


def test_reports_of_the_engine_are_shown():
    metrics = Metrics("tiny")
    first = EngineReport(
        num_running=3,
        num_waiting=2,
        num_waiting_tokens=900,
        num_pages_used=16,
        num_pages=64,
        num_step_tokens=40,
        num_preempted=1,
        queue_seconds=(0.3, 4.0),
    )
    second = EngineReport(
        num_running=4,
        num_waiting=1,
        num_waiting_tokens=500,
        num_pages_used=32,
        num_pages=64,
        num_step_tokens=8,
    )
    metrics.take_report(first)
    metrics.take_report(second)
    metrics.take_report(
        replace(second, num_pages_used=48, num_step_tokens=0, is_paused=True)
    )  # after an abort
    samples = parse(metrics.page().decode())
    assert {name: samples[name] for name in GAUGES} == {
        "num_requests_running": 4,
        "num_requests_waiting": 1,
        "num_tokens_waiting": 500,
        "kv_cache_pages": 64,
        "kv_cache_pages_used": 48,
        "kv_cache_usage_perc": 0.75,
        "engine_paused": 1,
        "engine_sleeping": 0,
    }
    assert samples["num_preemptions_total"] == 1
    assert samples["iteration_tokens_total_count"] == 2
    assert samples["iteration_tokens_total_sum"] == 48
    assert samples["request_queue_time_seconds_count"] == 2
    assert samples["request_queue_time_seconds_sum"] == pytest.approx(4.3)
    metrics.take_report(EngineReport())
    samples = parse(metrics.page().decode())
    assert not any(samples[name] for name in GAUGES)


@pytest.mark.parametrize("name", ['a"b\\c\nd', "modèle/世界", "folder\udcff"])
def test_any_model_name_is_escaped(name):
    families = text_string_to_metric_families(Metrics(name).page().decode())
    names = {sample.labels.get("model_name", "") for f in families for sample in f.samples}
    assert names - {""} == {name.replace("\udcff", "?")}


def test_two_servers_in_one_process_count_separately(make_server):
    first, second = (make_server(ServerConfig(served_model_name=["tiny"])) for _ in range(2))
    first.complete(max_tokens=2)
    assert parse(first.get("/metrics").text)["generation_tokens_total"] == 2
    assert parse(second.get("/metrics").text)["generation_tokens_total"] == 0


def test_invalid_http_request_does_not_break_metrics(live):
    with socket.create_connection(("127.0.0.1", live)) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert httpx.get(f"http://127.0.0.1:{live}/metrics").status_code == 200


def test_every_metric_of_the_page_is_documented(server):
    families = text_string_to_metric_families(server.get("/metrics").text)
    text = (Path(__file__).resolve().parents[3] / "qserve" / "docs" / "operator.md").read_text()
    documented = set(re.findall(r"`(qserve:\w+)`", text))
    found = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if family.name.startswith("qserve:") and not family.name.endswith("_created")
    }
    of_engines = {"qserve:cache_config_info", "qserve:lora_requests_info"}  # their start makes them
    assert documented == found | of_engines


def test_latency_and_size_metrics_equal_vllm_dashboard(server, read):
    server.complete(prompt=[5] * 30, max_tokens=4)
    server.complete(prompt=[5] * 3, n=2, max_tokens=2)
    server.complete(prompt=[5], max_tokens=1)
    samples = read()
    for name, total in (
        ("request_prompt_tokens", 30 + 3 + 3 + 1),
        ("request_generation_tokens", 4 + 2 + 2 + 1),
        ("request_params_max_tokens", 4 + 2 + 2 + 1),
    ):
        assert (samples[f"{name}_count"], samples[f"{name}_sum"]) == (4, total), name
    assert samples["request_prompt_tokens_bucket 20.0"] == 3
    assert (samples["request_params_n_count"], samples["request_params_n_sum"]) == (3, 4)
    longest = "request_max_num_generation_tokens"
    assert (samples[f"{longest}_count"], samples[f"{longest}_sum"]) == (3, 4 + 2 + 1)
    assert samples["request_time_per_output_token_seconds_count"] == 3
    for name in ("prefill", "decode", "inference"):
        assert samples[f"request_{name}_time_seconds_count"] == 4


def test_cached_tokens_and_preemptions_are_counted():
    metrics = Metrics("m", "vllm")
    for cached, preemptions in ((0, 0), (16, 2)):
        with metrics.output(time.perf_counter(), 20, None) as meter:
            for _ in range(2):
                meter.take(
                    TokenEvent(
                        request_id="r",
                        token_ids=(7,),
                        facts=RequestFacts(num_cached=cached, num_preemptions=preemptions),
                    )
                )
            meter.reason = "stop"
    samples = {name.removeprefix("vllm:"): v for name, v in parse(metrics.page().decode()).items()}
    assert (samples["prompt_tokens_total"], samples["prompt_tokens_cached_total"]) == (40, 16)
    assert samples["request_prefill_kv_computed_tokens_sum"] == 20 + 4
    preempted = "request_num_preemptions"
    assert (samples[f"{preempted}_count"], samples[f"{preempted}_sum"]) == (2, 2)
    assert samples[f"{preempted}_bucket 1.0"] == 1
    assert samples["time_per_output_token_seconds_count"] == 2
    assert samples["inter_token_latency_seconds_count"] == 2


def test_request_phases_sum_to_total():
    """1 s in the queue, 2 s of prompt, 3 s of 4 tokens; the server had it 0.5 s before."""
    metrics = Metrics("m")
    meter = metrics.output(arrived=100.0, num_prompt_tokens=9, max_tokens=None)
    meter._first, meter._last, meter._num_tokens = 103.5, 106.5, 4
    meter._facts = RequestFacts(queue_seconds=1.5)
    meter.reason = "stop"
    with meter:
        pass
    samples = parse(metrics.page().decode())
    assert samples["request_prefill_time_seconds_sum"] == 2.0
    assert samples["request_decode_time_seconds_sum"] == 3.0
    assert samples["request_inference_time_seconds_sum"] == 5.0
    assert samples["request_time_per_output_token_seconds_sum"] == 1.0
    assert samples["e2e_request_latency_seconds_sum"] == 6.5


def test_refusals_are_counted_by_limit(make_server):
    limits = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 100}
    server = make_server(ServerConfig(served_model_name=["tiny"], **limits))
    with server.app.state.service.admission.admit("c", 1, 80):
        assert server.complete(n=8).status_code == 503
        assert server.complete(prompt=[5] * 50).status_code == 503
        assert server.complete(prompt=[5] * 60).status_code == 503
    samples = parse(server.get("/metrics").text)
    assert samples["admission_rejections_total outputs"] == 1
    assert samples["admission_rejections_total prompt_tokens"] == 2


def test_settings_of_the_kv_pages_are_labels():
    metrics = Metrics("m")
    metrics.take_report(EngineReport(num_pages=64, num_waiting=3))
    metrics.describe_cache(EngineConfig(model="m", block_size=32))
    text = metrics.page().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("qserve:cache_config_info{")]
    assert 'block_size="32"' in line and 'num_gpu_blocks="64"' in line and line.endswith(" 1.0")
    assert 'num_requests_waiting_by_reason{model_name="m",reason="capacity"} 3.0' in text
