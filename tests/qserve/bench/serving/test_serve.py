"""`qserve bench serve` against a server whose delays are known, and against vLLM's keys."""

import asyncio
import json
import subprocess
import sys

import pytest

from formats.errors import InputError
from qserve.bench.requests.dataset_settings import DatasetSettings
from qserve.bench.requests.traffic import arrival_times
from qserve.bench.serving.serve import bench_serve, run
from qserve.bench.serving.serve_metrics import RequestRecord, ServeMetrics, table
from qserve.bench.serving.serve_settings import ServeBenchSettings
from tests.qserve.bench.serving.scripted_server import FIRST, GAP, TOKENS, scripted_server

# as `vllm bench serve --save-result` writes them
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl")
    ),
}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times"} | {
    *("generated_texts", "errors")
}
SLOWER = (1, 8, 30)  # times the script's delays: a busy machine is late by less than half of one


@pytest.fixture(scope="module")
def server():
    with scripted_server() as running:
        yield running


def settings(server, **others):
    return ServeBenchSettings(base_url=server.url, disable_tqdm=True, **others)


def data(**others):
    return DatasetSettings(**({"num_prompts": 4, "random_input_len": 9} | others))


def run_on_time(server, asked, requests, wanted):
    """Results of a run whose medians are those of the script, {metric: seconds}, at some speed."""
    for slower in SLOWER:
        server.bodies.clear()
        server.first, server.gap = FIRST * slower, GAP * slower
        try:
            result = asyncio.run(run(asked, requests))
        finally:
            server.first, server.gap = FIRST, GAP
        found = {name: result[f"median_{name}_ms"] / (1e3 * slower) for name in wanted}
        # The script cannot be early, and the client's clock cannot run before its send.
        if all(0.5 * wanted[name] <= found[name] <= 1.5 * wanted[name] for name in wanted):
            return result
    raise AssertionError(f"expected {wanted} s, found {found}")


def test_latencies_equal_scripted_times(server):
    wanted = {"ttft": FIRST, "tpot": GAP, "itl": GAP, "e2el": FIRST + (TOKENS - 1) * GAP}
    asked = settings(server, percentile_metrics="ttft,tpot,itl,e2el", goodput=["ttft:60000"])
    result = run_on_time(server, asked, data(), wanted)
    assert result["completed"] == 4 and result["failed"] == 0
    assert result["total_output_tokens"] == 4 * TOKENS
    assert result["total_input_tokens"] == 4 * 9
    assert result["request_goodput"] == result["request_throughput"]
    body = server.bodies[0]
    assert body["ignore_eos"] and body["stream"] and len(body["prompt"]) == 9
    assert body["stream_options"] == {"include_usage": True}


def test_goodput_excludes_requests_beyond_a_limit(server):
    result = asyncio.run(run(settings(server, goodput=["ttft:1"]), data(num_prompts=1)))
    assert result["request_goodput"] == 0


@pytest.mark.parametrize("tells_ids", [True, False])
def test_tokens_without_text_are_timed(server, monkeypatch, tells_ids):
    monkeypatch.setattr(server, "tells_ids", tells_ids)
    server.silent_tokens = 3
    asked = settings(server, save_detailed=True)
    try:
        found = run_on_time(server, asked, data(num_prompts=1), {"ttft": FIRST})
    finally:
        server.silent_tokens = 0
    assert len(found["itls"][0]) == TOKENS - 1


def test_result_keys_equal_vllm(server, tmp_path):
    asked = settings(
        server, save_result=True, save_detailed=True, result_dir=str(tmp_path), metadata=["gpu=x"]
    )
    assert bench_serve(None, asked, data(num_prompts=2)) == 0
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert VLLM_KEYS | DETAILS | {"gpu"} <= found.keys()
    assert found["model_id"] == "scripted" and found["request_rate"] == "inf"
    extra = found.keys() - VLLM_KEYS - DETAILS - {"gpu"}
    assert extra == {"client_send_lag_p99_ms", "client_loop_lag_p99_ms"}


def test_max_concurrency_is_the_limit(server):
    server.max_open = 0
    asyncio.run(run(settings(server, max_concurrency=2), data(num_prompts=5)))
    assert server.max_open == 2


def test_failed_request_is_counted_and_reported(server, capsys):
    server.fails = True
    try:
        assert bench_serve(None, settings(server), data(num_prompts=3)) == 1
    finally:
        server.fails = False
    shown = capsys.readouterr()
    assert "3 requests failed: status 503: no room" in shown.err
    assert "completed none of 3 requests" in shown.err and "status 503" not in shown.out
    assert "TTFT" not in shown.out  # a table of zeros looks like a measurement


def test_thousand_streams_at_once(server):
    server.first = 1.0  # until all are there
    server.max_open = 0
    try:
        result = asyncio.run(run(settings(server), data(num_prompts=1000, random_input_len=1)))
    finally:
        server.first = FIRST
    assert result["completed"] == 1000 and result["max_concurrent_requests"] == 1000
    assert result["total_output_tokens"] == 1000 * TOKENS


def test_unreachable_server_gives_one_line_error(server):
    asked = ServeBenchSettings(base_url="http://127.0.0.1:9", disable_tqdm=True)
    with pytest.raises(InputError, match="start the server"):
        asyncio.run(run(asked, data()))


def test_torch_is_not_loaded():
    code = (
        "import sys\n"
        "from qserve.cli import build_parser\n"
        "import qserve.bench.serving.serve\n"
        "build_parser()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def record(start, times, output_len=None, **others):
    output_len = len(times) if output_len is None else output_len
    return RequestRecord(
        prompt_len=10,
        start=start,
        output_len=output_len,
        token_times=times,
        end=times[-1],
        **others,
    )


def test_metrics_equal_handmade():
    records = [
        record(0.0, [0.5, 0.7, 0.9]),
        record(1.0, [1.25]),  # one token: no TPOT
        record(1.0, [2.0, 2.5], output_len=4),  # a chunk with several tokens
        record(0.0, [9.0], error="lost"),
    ]
    metrics = ServeMetrics(records=records, duration=2.5)
    assert metrics.seconds["ttft"] == [0.5, 0.25, 1.0]
    assert metrics.seconds["tpot"] == pytest.approx([0.2, 0.5 / 3])
    assert metrics.seconds["itl"] == pytest.approx([0.2, 0.2, 0.5])
    assert metrics.seconds["e2el"] == pytest.approx([0.9, 0.25, 1.5])
    assert metrics.goodput({"ttft": 600, "tpot": 190}) == pytest.approx(1 / 2.5)
    found = metrics.to_dict(metrics=("ttft",), wanted=(50, 99))
    assert found["output_throughput"] == 8 / 2.5 and found["failed"] == 1
    assert found["total_token_throughput"] == (30 + 8) / 2.5
    assert found["p99_ttft_ms"] == pytest.approx(1000 * (0.5 + 0.98 * 0.5))
    assert found["max_concurrent_requests"] == 2


GOLDEN = """\
============ Serving Benchmark Result ============
Successful requests:                     1
Failed requests:                         0
Maximum request concurrency:             8
Request rate configured (RPS):           2.00
Benchmark duration (s):                  2.00
Total input tokens:                      10
Total generated tokens:                  3
Request throughput (req/s):              0.50
Request goodput (req/s):                 0.50
Output token throughput (tok/s):         1.50
Peak output token throughput (tok/s):    3.00
Peak concurrent requests:                1.00
Total token throughput (tok/s):          6.50
---------------Time to First Token----------------
Mean TTFT (ms):                          250.00
Median TTFT (ms):                        250.00
P99 TTFT (ms):                           250.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          125.00
Median TPOT (ms):                        125.00
P99 TPOT (ms):                           125.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           125.00
Median ITL (ms):                         125.00
P99 ITL (ms):                            125.00
----------------End-to-end Latency----------------
Mean E2EL (ms):                          500.00
Median E2EL (ms):                        500.00
P99 E2EL (ms):                           500.00
=================================================="""


def test_result_table_equals_vllm():
    metrics = ServeMetrics(records=[record(0.0, [0.25, 0.375, 0.5])], duration=2.0)
    names = ("ttft", "tpot", "itl", "e2el")
    result = metrics.to_dict(metrics=names, wanted=(99,), limits_ms={"ttft": 300.0})
    result |= {"max_concurrency": 8, "request_rate": 2.0}
    found = [line.rstrip() for line in table(result, names, (99,)).splitlines()]
    assert found == GOLDEN.splitlines()


def test_arrival_rate_and_burstiness():
    even = arrival_times(100, rate=10, burstiness=float("inf"))
    assert even == pytest.approx([(i + 1) / 10 for i in range(100)])
    poisson = arrival_times(2000, rate=10, seed=3)
    assert poisson[-1] == pytest.approx(200) and poisson == arrival_times(2000, rate=10, seed=3)
    gaps = [b - a for a, b in zip(poisson, poisson[1:], strict=False)]
    variance = sum((gap - 0.1) ** 2 for gap in gaps) / len(gaps)
    assert 0.8 < variance**0.5 / 0.1 < 1.2
    ramp = arrival_times(100, rate=1, burstiness=float("inf"), ramp_up=("linear", 1, 10))
    assert ramp[1] - ramp[0] == pytest.approx(1, rel=0.1)
    assert ramp[-1] - ramp[-2] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"goodput": ["itl:3"]}, "--goodput"),
        ({"percentile_metrics": "ttfb"}, "--percentile-metrics"),
        ({"ramp_up_strategy": "linear"}, "--ramp-up-strategy"),
        ({"request_rate": 0}, "--request-rate"),
        ({"header": ["x"]}, "--header"),
    ],
)
def test_invalid_value_error_names_flag(wrong, named):
    with pytest.raises(InputError, match=named):
        ServeBenchSettings(**wrong)
