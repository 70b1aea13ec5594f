"""Cases 31 to 40 of test_forty_cases.py: clients, limits, ends.

The last cases end the engine or the server.
"""

import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.qserve.server.forty_cases import KEY, NUM_QUEUED, NUM_SEQS, ORIGIN, PAGE, start_cases
from tests.qserve.server.real_server import GUARD, Api, children, engine_of, refused, until


@pytest.fixture(scope="module")
def running(start_server, docs_5m):
    return start_cases(start_server, docs_5m)


@pytest.fixture(scope="module")
def api(running):
    return Api(running.url, KEY)


def test_31_disconnects(api):
    fields = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 4}
    with api.http.stream("POST", "/v1/completions", json=fields) as reply:
        lines = reply.iter_lines()  # kept: a dropped one hangs up
        next(lines)
        assert api.metric("num_requests_admitted") == 4
    api.until_idle()
    with ThreadPoolExecutor(12) as pool:

        def leave(_):
            try:
                httpx.post(
                    f"{api.http.base_url}/v1/completions",
                    json=fields | {"stream": False, "n": 1},
                    headers=dict(api.http.headers),
                    timeout=0.1,
                )
            except httpx.TimeoutException:
                return

        list(pool.map(leave, range(12)))
    assert api.complete().status_code == 200
    api.until_idle()


def test_32_slow_reader_delays_no_one(api):
    body = json.dumps({"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += "Content-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", api.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert slow.recv(1) == b"H"
        for _ in range(5):
            assert api.complete().status_code == 200
            slow.recv(1)
    api.until_idle()


def test_33_full_queue(api):
    most = NUM_SEQS + NUM_QUEUED
    # Too long for the buffers of a connection that is not read: it lasts until the client leaves.
    fields = {"max_tokens": 200, "ignore_eos": True, "logprobs": 20}
    body = {"prompt": "a", "n": most, "stream": True, **fields}
    with api.http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()  # kept: a dropped one hangs up
        next(lines)
        assert api.metric("num_requests_admitted") == most
        refusal = api.complete(n=most // 2)
        assert refused(refusal, 503)["type"] == "service_unavailable_error"
        assert int(refusal.headers["retry-after"]) > 0
    assert api.metric("admission_rejections_total") >= 1
    api.until_idle()
    assert api.complete().status_code == 200


@pytest.mark.parametrize("header", [None, "", f"bearer {KEY}", f"Bearer  {KEY}", "Bearer x", KEY])
def test_35_key_required_except_probes(api, header):
    described = api.http.get("/openapi.json").json()["paths"]
    headers = {} if header is None else {"Authorization": header}
    with httpx.Client(base_url=api.http.base_url) as client:
        for path, methods in described.items():
            for method in methods:
                reply = client.request(method, path, headers=headers)
                if path in ("/health", "/ready", "/ping"):
                    assert reply.status_code == 200
                elif path.startswith("/v1/messages"):  # errors in Anthropic's form
                    assert reply.status_code == 401
                    assert reply.json()["error"]["type"] == "authentication_error"
                else:
                    assert refused(reply, 401)["type"] == "authentication_error"
        asked = {"Access-Control-Request-Method": "POST", "Origin": ORIGIN}
        assert client.options("/v1/completions", headers=asked).status_code == 200


def test_36_other_origins(api):
    ask = {"Access-Control-Request-Method": "POST", "Origin": ORIGIN}
    reply = api.http.options("/v1/completions", headers=ask)
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    other = api.http.options("/v1/completions", headers=ask | {"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_37_prefix_cache_hit(api):
    prompt = list(range(1000, 1000 + 2 * PAGE + 3))

    def ask(**fields):
        reply = api.complete(prompt=prompt, logprobs=1, **fields).json()
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, reply["choices"][0]["logprobs"]["token_logprobs"]

    cold, warm, salted = ask(), ask(), ask(cache_salt="mine")
    assert (cold[0], warm[0], salted[0]) == (0, 2 * PAGE, 0)
    assert warm[1] == pytest.approx(cold[1], abs=1e-4)


@pytest.mark.exhaustive
def test_38_out_of_kv_pages(api):
    prompts = [[100 + n] * 8 for n in range(NUM_SEQS)]
    fields = {"max_tokens": 100, "ignore_eos": True}
    alone = [api.text(prompt=prompts[n], **fields) for n in (0, NUM_SEQS - 1)]
    before = api.metric("num_preemptions_total")
    choices = api.complete(prompt=prompts, **fields).json()["choices"]
    assert api.metric("num_preemptions_total") > before
    assert all(choice["finish_reason"] == "length" for choice in choices)
    assert [choices[0]["text"], choices[-1]["text"]] == alone


def test_40_nan_logits(server, error):
    """The scripted engine fails one request as the real one does for NaN logits."""
    server.client.fails_at = 0
    reply = server.complete()
    assert error(reply, 500)["type"] == "server_error"
    assert reply.headers["x-should-retry"] == "false"
    server.client.fails_at = None
    assert server.complete().status_code == 200
    assert 'request_success_total{finished_reason="error"' in server.get("/metrics").text


@pytest.mark.exhaustive  # a second start of the engine; test_serve.py has it with a scripted one
def test_39_engine_death(api, running):
    fields = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 8}
    with api.http.stream("POST", "/v1/completions", json=fields) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(engine_of(running.process.pid), signal.SIGKILL)
        *_, error, end = (line for line in lines if line)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert end == "data: [DONE]"
    health = api.http.get("/health")
    assert health.status_code == 503 and int(health.headers["retry-after"]) > 0
    refused(api.complete(), 503)
    until(lambda: api.http.get("/health").status_code == 200)
    assert api.complete().status_code == 200


@pytest.mark.exhaustive
def test_34_graceful_shutdown(api, running):
    before = children(running.process.pid)
    replies = []
    fields = {"max_tokens": 100, "ignore_eos": True}
    thread = threading.Thread(target=lambda: replies.append(api.complete(**fields)))
    thread.start()
    until(lambda: api.metric("num_requests_admitted") == 1)
    assert running.stop() == 0
    thread.join(GUARD)
    assert replies[0].json()["usage"]["completion_tokens"] == 100
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{running.url}/health")
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
