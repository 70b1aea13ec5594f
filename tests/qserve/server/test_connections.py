"""Clients on a real port: those that leave, those that read slowly, and the official one."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from qserve.config import ServerConfig
from qserve.server.http import http_protocol, listener
from qserve.server.http.http_protocol import Connections
from qserve.server.openai import completions
from qserve.server.prepare.preparation import SHORT_BYTES
from qserve.server.web_server import WebServer, uvicorn_config

TEXT = "Hello there, general reader."
GUARD = 60.0  # seconds, against hanging
BODY = {"prompt": "Once", "max_tokens": 200}


def until(condition, timeout: float = GUARD) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def send(port: int, body: dict, path: str = "/v1/completions") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.fixture
def ask(live):
    def post(timeout: float = GUARD, **fields) -> dict:
        url = f"http://127.0.0.1:{live}/v1/completions"
        reply = httpx.post(url, json={**BODY, **fields}, timeout=timeout)
        assert reply.status_code == 200
        return reply.json()

    return post


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("when", ["before the first token", "in the middle"])
def test_disconnect_aborts_requests(server, live, stream, n, when):
    server.client.endless = True
    server.client.delay = 60 if when == "before the first token" else 0.01
    connection = send(live, {**BODY, "stream": stream, "n": n, "max_tokens": None, "stop": "§"})
    until(lambda: len(server.client.running) == n)
    if stream and when == "in the middle":
        assert connection.recv(100)
    connection.close()
    until(lambda: not server.client.running)
    assert len(server.client.aborted) == n


def test_many_disconnects_leave_no_state(server, live, ask):
    server.client.endless, server.client.delay = True, 0.5
    connections = [send(live, {**BODY, "stream": bool(i % 2)}) for i in range(60)]
    until(lambda: len(server.client.running) == 60)
    for connection in connections:
        connection.close()
    until(lambda: not server.client.running)
    server.client.endless, server.client.delay = False, 0
    assert ask()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limit", "held", "asked"),
    [
        ({"max_num_queued_reqs": 4}, {"n": 12}, {"n": 1}),  # in addition to the 8 that run
        ({"max_num_queued_reqs": 4}, {"n": 2}, {"n": 11}),
        ({"max_num_queued_tokens": 50}, {"prompt": [5] * 9, "n": 5}, {"prompt": [5] * 6}),
        ({"max_num_queued_tokens": 50}, {"prompt": [5] * 60}, {"prompt": [5]}),
    ],
)
def test_queue_full_returns_retry_after(make_server, run_live, error, limit, held, asked, stream):
    server = make_server(ServerConfig(served_model_name=["tiny"], **limit))
    port = run_live(server)
    server.client.delay = GUARD  # they hold their places until the client leaves
    # what a server without any other work takes may be more than the limit
    connection = send(port, {**BODY, **held, "max_tokens": None, "ignore_eos": True})
    until(lambda: len(server.client.running) == held.get("n", 1))
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {**BODY, **asked, "max_tokens": 2, "stream": stream}
    reply = httpx.post(url, json=body)
    assert "busy" in error(reply, 503)["message"] and int(reply.headers["retry-after"]) > 0
    assert len(server.client.running) == held.get("n", 1)
    connection.close()
    until(lambda: not server.client.running)
    server.client.delay = 0
    assert httpx.post(url, json=body).status_code == 200


@pytest.mark.exhaustive
def test_slow_reader_delays_only_itself(server, live, ask):
    """A real engine merges events; the script must not be asked for more."""
    server.client.endless = True
    server.client.max_model_len = 10**9
    connection = send(live, {**BODY, "stream": True, "max_tokens": 10**8})
    until(lambda: server.client.running)
    decoded = []
    original = server.tokenizer.decode
    server.tokenizer.decode = lambda *args, **kw: decoded.append(1) or original(*args, **kw)
    try:
        count = -1
        deadline = time.monotonic() + GUARD
        while count != len(decoded) and time.monotonic() < deadline:
            count = len(decoded)
            time.sleep(0.5)
        assert count == len(decoded), "the stream is produced without end though nobody reads it"
    finally:
        del server.tokenizer.decode
    server.client.endless = False
    assert ask()["choices"][0]["text"] == TEXT
    connection.close()
    until(lambda: not server.client.running)


def test_client_that_never_reads_is_disconnected(server, live, ask, monkeypatch):
    monkeypatch.setattr(http_protocol, "UNREAD_SECONDS", 0.3)
    server.client.endless = True
    server.client.max_model_len = 10**9
    silent = send(live, {**BODY, "stream": True, "max_tokens": 10**8})
    until(lambda: server.client.running)
    until(lambda: not server.client.running, timeout=GUARD)
    server.client.endless = False
    assert ask()["choices"][0]["text"] == TEXT
    silent.close()


def test_tokens_arrive_one_by_one(server, live):
    server.client.gate = threading.Semaphore(1)
    url = f"http://127.0.0.1:{live}/v1/completions"
    with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=GUARD) as reply:
        lines = (line for line in reply.iter_lines() if line)
        for word in ("Hello", " there"):  # the engine has not said the next one when it comes
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == word
            server.client.gate.release()
        for _ in range(20):
            server.client.gate.release()
        assert list(lines)[-1] == "data: [DONE]"


def test_oversized_body_gets_a_reply(live):
    connection = send(live, {"prompt": "a" * (20 * 2**20)})
    assert connection.recv(12) == b"HTTP/1.1 413"


def test_disconnect_during_request_body(server, live, ask):
    connection = socket.create_connection(("127.0.0.1", live))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: 99\r\n\r\n{")
    time.sleep(0.1)
    connection.close()
    assert ask()["choices"][0]["text"] == TEXT and len(server.client.requests) == 1


@pytest.fixture
def others_are_answered(live):
    """A function that holds up its caller, in the server, until another request is answered."""
    answered, called = threading.Event(), threading.Event()

    def wait() -> None:
        called.set()
        assert answered.wait(GUARD), "another request waited for this one"

    def ask_health() -> None:
        called.wait(GUARD)
        for _ in range(3):
            httpx.get(f"http://127.0.0.1:{live}/health", timeout=GUARD)
        answered.set()

    thread = threading.Thread(target=ask_health)
    thread.start()
    yield wait
    assert called.is_set() and answered.is_set()
    thread.join()


def test_encoding_a_prompt_does_not_delay_others(server, ask, others_are_answered, monkeypatch):
    original = server.tokenizer.encode

    def slow(*arguments):
        others_are_answered()
        return original(*arguments)

    monkeypatch.setattr(server.tokenizer, "encode", slow)
    assert ask(user="u" * SHORT_BYTES)["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(("length", "is_in_thread"), [(0, False), (SHORT_BYTES, True)])
def test_short_body_is_prepared_without_a_thread(server, ask, monkeypatch, length, is_in_thread):
    original, threads = server.tokenizer.encode, []

    def watched(*arguments):
        threads.append(threading.current_thread().name)
        return original(*arguments)

    monkeypatch.setattr(server.tokenizer, "encode", watched)
    assert ask(user="u" * length)["choices"][0]["text"] == TEXT
    assert threads[0].startswith("preparation") == is_in_thread


def test_writing_many_logprobs_does_not_delay_others(server, ask, others_are_answered, monkeypatch):
    original = completions.completion_logprobs

    def slow(*arguments, **options):
        others_are_answered()
        return original(*arguments, **options)

    monkeypatch.setattr(completions, "completion_logprobs", slow)
    assert ask(logprobs=1)["choices"][0]["text"] == TEXT


@pytest.fixture
def client(live):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{live}/v1", api_key=["none"], max_retries=0
    ) as client:
        yield client


def test_official_client_completes_and_chats(client):
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(model="tiny", messages=messages)
    assert chat.choices[0].message.content == TEXT
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    completion = client.completions.create(model="tiny", prompt="Once", max_tokens=100)
    assert completion.choices[0].text == TEXT
    assert client.models.retrieve("tiny").id == "tiny"
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_official_client_streams(client):
    messages = [{"role": "user", "content": "Hi"}]
    with client.chat.completions.create(
        model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == TEXT
    assert choices[-1].finish_reason == "stop" and chunks[-1].usage.completion_tokens > 0
    stream = client.completions.create(model="tiny", prompt="Once", max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_official_client_raises_its_own_errors(server, client):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="tiny", prompt="a", temperature=3)
    assert caught.value.param == "temperature"
    server.client.fails_at = 2
    with pytest.raises(openai.APIError, match="generation failed"):
        list(client.completions.create(model="tiny", prompt="a", stream=True))
    server.client.fails_at, server.client.dies_at, server.client.others_live = None, 0, True
    with pytest.raises(openai.InternalServerError, match="died before .* Try again") as caught:
        client.completions.create(model="tiny", prompt="a")
    assert caught.value.status_code == 503  # not a 500 that blames the model
    server.client.others_live = False
    with pytest.raises(openai.InternalServerError, match="engine has died"):
        client.completions.create(model="tiny", prompt="a")


def test_official_client_that_closes_its_stream(server, client):
    server.client.endless, server.client.delay = True, 0.01
    stream = client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=250)
    next(iter(stream))
    stream.close()
    until(lambda: not server.client.running)


def test_bundled_example_asks_and_prints(live, server):
    example = Path(__file__).resolve().parents[3] / "examples" / "ask.py"
    command = [sys.executable, "-I", str(example), f"http://127.0.0.1:{live}", "Who?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD)
    assert (done.returncode, done.stdout) == (0, TEXT + "\n")
    server.client.fails_at = 2
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 1 and "generation failed" in done.stderr
    server.client.is_alive = False
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 1 and "503" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def stoppable(make_server):
    """A server as `serve` runs it: (itself, its URL, stop)."""
    stopping = threading.Event()
    server = make_server(ServerConfig(served_model_name=["tiny"]), is_stopping=stopping.is_set)
    web = WebServer(uvicorn_config(server.app, Connections(limit=100)), "Ready at", 600.0, stopping)
    sockets = [listener.bind(ServerConfig(host="127.0.0.1", port=0))]
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await web.serve(sockets=sockets)

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    url = listener.address(sockets[0], tls=False)
    thread.start()
    until(lambda: web.started)
    yield server, url, lambda: loops[0].call_soon_threadsafe(web.stop)
    with contextlib.suppress(RuntimeError):  # it has ended
        loops[0].call_soon_threadsafe(web.stop)
    thread.join(GUARD)
    assert not thread.is_alive()


def test_ready_answers_503_while_requests_finish(stoppable):
    """A load balancer that asks must learn that the server leaves, and new work go elsewhere."""
    server, url, stop = stoppable
    server.client.gate = threading.Semaphore(1)  # the first token alone
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=GUARD
    ) as reply:
        assert httpx.get(f"{url}/ready").status_code == 200
        stop()
        until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        for _ in range(3):
            assert httpx.get(f"{url}/ready").json()["error"]["code"] == 503
            assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/v1/completions", json=BODY)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert refused.headers["connection"] == "close"
        server.client.gate.release(1000)
        assert list(reply.iter_lines())[-2:] == ["data: [DONE]", ""]
    until(lambda: not is_answered(url))  # then it ends immediately


def is_answered(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code > 0
    except httpx.TransportError:  # not connected, or closed before the answer
        return False
