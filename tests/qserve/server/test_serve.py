"""The whole server in its own process, with an engine process that needs no model."""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from qserve.text.tokenizer_record import record_path, write_record

HERE = Path(__file__).resolve().parent
STEP_FAILS, PROCESS_DIES, STEP_IS_SLOW, EATS_MEMORY = 101, 102, 104, 106  # of fake_engine
GUARD = 60  # seconds, against hanging
PROGRAM = """
import sys
from formats.errors import InputError
from qserve.config import EngineConfig, ServerConfig
from qserve.server import hosted_model, serve
if sys.argv[6] == "0":  # it takes seconds to load
    hosted_model.start_preparation = lambda *arguments: hosted_model.Preparation()
settings = dict(each.split("=") for each in sys.argv[7:])
settings = {name: (float if "timeout" in name else int)(value) for name, value in settings.items()}
config = ServerConfig(
    host=sys.argv[2],
    port=int(sys.argv[3]),
    served_model_name=["tiny"],
    shutdown_timeout=float(sys.argv[5]),
    **settings,
)
try:
    engine_config = EngineConfig(model=sys.argv[1], max_model_len=int(sys.argv[4]))
    sys.exit(serve.serve(engine_config, config, engine="fake_engine:FakeEngine"))
except InputError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture
def start(tmp_path, docs_5m):
    """Start a server; the processes that a test leaves are killed."""
    started = []

    def run(
        model=docs_5m,
        host="127.0.0.1",
        port=0,
        max_model_len=2048,
        grace=10.0,
        worker=False,
        **settings,
    ):
        path = os.pathsep.join([str(HERE.parent), str(HERE.parents[2])])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "FAKE_ENGINE_JOURNAL": str(tmp_path / "journal"),
        }
        options = map(str, (model, host, port, max_model_len, grace, int(worker)))
        soft = settings.pop("descriptors", None)
        hard = settings.pop("hard_descriptors", soft)
        options = [*options, *(f"{name}={value}" for name, value in settings.items())]
        command = [sys.executable, "-c", PROGRAM, *options]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=soft and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))),
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen) -> str:
    line = process.stdout.readline()
    assert line.startswith("Serving tiny on http://"), line + process.stderr.read()
    return line.split()[-1]


def engine_pid(tmp_path: Path) -> int:
    return int((tmp_path / "journal").read_text().split()[1])


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.exhaustive
def test_sigterm_finishes_running_requests_and_leaves_no_process(start, tmp_path):
    process = start()
    url = url_of(process)
    assert httpx.get(f"{url}/health").status_code == 200
    replies = []
    body = {"prompt": [1], "max_tokens": 400}
    thread = threading.Thread(
        target=lambda: replies.append(httpx.post(f"{url}/v1/completions", json=body, timeout=GUARD))
    )
    thread.start()
    while "add cmpl" not in (tmp_path / "journal").read_text():
        assert thread.is_alive(), replies
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    thread.join()
    assert replies[0].json()["usage"]["completion_tokens"] == 400
    assert process.wait(GUARD) == 0
    assert not is_running(engine_pid(tmp_path))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert "Traceback" not in process.stderr.read()


@pytest.mark.exhaustive
def test_interrupt_from_the_terminal_reaches_the_server_alone(start, tmp_path):
    """Ctrl-C goes to every process of the group; the engine must outlive the running requests."""
    process = start()
    url = url_of(process)
    replies = []
    body = {"prompt": [1], "max_tokens": 300}
    thread = threading.Thread(
        target=lambda: replies.append(httpx.post(f"{url}/v1/completions", json=body, timeout=GUARD))
    )
    thread.start()
    while "add cmpl" not in (tmp_path / "journal").read_text():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    thread.join()
    assert replies[0].json()["usage"]["completion_tokens"] == 300
    assert process.wait(GUARD) == 0


@pytest.mark.exhaustive
def test_second_signal_aborts_running_requests(start, tmp_path):
    process = start(grace=1000)  # which the test would not wait for
    url = url_of(process)
    body = {"prompt": [STEP_IS_SLOW], "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD) == 0, process.stderr.read()
    assert not is_running(engine_pid(tmp_path))


@pytest.mark.exhaustive
def test_requests_beyond_shutdown_timeout_end_with_error(start, tmp_path):
    process = start(grace=0.5)
    url = url_of(process)
    body = {"prompt": [STEP_IS_SLOW], "max_tokens": 2000, "n": 2}
    wholes = []
    thread = threading.Thread(
        target=lambda: wholes.append(httpx.post(f"{url}/v1/completions", json=body, timeout=GUARD))
    )
    thread.start()
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        *_, error, end = (line for line in lines if line)
    error = json.loads(error.removeprefix("data: "))["error"]
    assert error["code"] == 503 and "The server was stopped before" in error["message"]
    assert end == "data: [DONE]"
    thread.join()
    assert wholes[0].status_code == 503 and wholes[0].json()["error"] == error
    assert process.wait(GUARD) == 0
    log = process.stderr.read()
    assert "Stopping; 2 running requests may take 0.5 s to finish" in log
    assert "Aborting 2 running requests" in log
    assert "Traceback" not in log and "died" not in log
    assert not is_running(engine_pid(tmp_path))


@pytest.mark.exhaustive
def test_shutdown_closes_connection_with_partial_body(start, tmp_path):
    process = start(grace=0.3)
    address = httpx.URL(url_of(process))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 99\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=GUARD) as client:
        client.sendall(head + b"{")
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1000) == b""
        assert process.wait(GUARD) == 0
    assert "Traceback" not in process.stderr.read()
    assert not is_running(engine_pid(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "token", [pytest.param(STEP_FAILS, marks=pytest.mark.exhaustive), PROCESS_DIES]
)
def test_dead_engine_fails_the_requests_and_ends_the_server(start, token):
    process = start()
    url = url_of(process)
    body = {"prompt": [token], "max_tokens": 50}
    reply = httpx.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == (
        "The engine has died; the server is stopping. Try again later."
    )
    assert process.wait(GUARD) == 1
    assert "The engine died" in process.stderr.read()


@pytest.mark.exhaustive
def test_stopped_engine_fails_the_requests_and_ends_the_server(start, tmp_path):
    process = start(engine_timeout=2)
    url = url_of(process)
    body = {"prompt": [STEP_IS_SLOW], "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=GUARD) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(engine_pid(tmp_path), signal.SIGSTOP)
        *_, error, end = (line for line in lines if line)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert end == "data: [DONE]"
    assert process.wait(GUARD) == 1
    assert "sent no message for 2 s" in process.stderr.read()
    assert not is_running(engine_pid(tmp_path))


@pytest.mark.exhaustive
def test_dead_engine_restarts_and_clients_get_retry_after(start, tmp_path):
    process = start(restart_engine=1)
    url = url_of(process)
    body = {"prompt": [PROCESS_DIES], "max_tokens": 50}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=GUARD)
    assert reply.status_code == 503 and "restarting" in reply.json()["error"]["message"]
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503 and int(health.headers["retry-after"]) > 0
    while httpx.get(f"{url}/health").status_code == 503:
        assert process.poll() is None
        time.sleep(0.05)
    body = {"prompt": [1], "max_tokens": 5}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    assert "qserve:engine_restarts_total" in httpx.get(f"{url}/metrics").text
    process.send_signal(signal.SIGTERM)
    assert process.wait(GUARD) == 0


@pytest.mark.exhaustive
def test_engine_killed_by_memory_limit_restarts(start, tmp_path):
    process = start(restart_engine=1)
    url = url_of(process)
    first = engine_pid(tmp_path)
    size = int(Path(f"/proc/{first}/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + 64 * 2**20
    resource.prlimit(first, resource.RLIMIT_AS, (limit, limit))
    slow = {"prompt": [STEP_IS_SLOW], "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=slow, timeout=GUARD) as reply:
        lines = reply.iter_lines()
        next(lines)
        hungry = {"prompt": [EATS_MEMORY], "max_tokens": 50}
        cause = httpx.post(f"{url}/v1/completions", json=hungry, timeout=GUARD)
        assert cause.status_code == 503
        assert httpx.get(f"{url}/health").status_code == 503
        *_, error, end = (line for line in lines if line)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert end == "data: [DONE]" and not is_running(first)
    while httpx.get(f"{url}/health").status_code == 503:
        assert process.poll() is None
        time.sleep(0.05)
    body = {"prompt": [1], "max_tokens": 5}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(GUARD) == 0
    assert "The engine died" in process.stderr.read()


@pytest.mark.exhaustive
def test_signal_while_the_engine_is_started_again_stops_everything(start, tmp_path):
    process = start(restart_engine=1)
    url = url_of(process)
    httpx.post(f"{url}/v1/completions", json={"prompt": [PROCESS_DIES], "max_tokens": 50})
    process.send_signal(signal.SIGTERM)
    assert process.wait(GUARD) == 0
    assert "Traceback" not in process.stderr.read()


@pytest.mark.exhaustive
def test_idle_connections_do_not_block_others(start):
    """More connections than descriptors: the server answers, and its log stays short."""
    process = start(descriptors=200)
    address = httpx.URL(url_of(process))
    idle = [socket.create_connection((address.host, address.port)) for _ in range(260)]
    for connection in idle[::2]:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
    for _ in range(5):
        assert httpx.get(f"{address}/health", timeout=GUARD).status_code == 200
    for connection in idle:
        connection.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(GUARD) == 0
    assert len(process.stderr.read()) < 5000


@pytest.mark.exhaustive
def test_descriptors_are_raised_to_the_hard_limit(start):
    process = start(descriptors=100, hard_descriptors=1000)
    address = httpx.URL(url_of(process))
    idle = [socket.create_connection((address.host, address.port)) for _ in range(150)]
    # a closed one would be readable
    assert httpx.get(f"{address}/health", timeout=GUARD).status_code == 200
    assert select.select(idle, [], [], 0.2)[0] == []
    for connection in idle:
        connection.close()


@pytest.mark.exhaustive
def test_large_bodies_are_prepared_by_the_worker_process(start, tmp_path):
    process = start(worker=True)
    url = url_of(process)
    prompts = [[5, 6]] * 100
    body = {"prompt": prompts, "max_tokens": 1, "user": "x" * 2**15}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=GUARD).json()
    assert reply["usage"] == {
        "prompt_tokens": 200,
        "completion_tokens": 100,
        "total_tokens": 300,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    wrong = httpx.post(f"{url}/v1/completions", json={**body, "top_p": 5}, timeout=GUARD)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "top_p"
    other = {**body, "model": "other"}
    assert httpx.post(f"{url}/v1/completions", json=other, timeout=GUARD).status_code == 404
    workers = [pid for pid in children(process.pid) if pid != engine_pid(tmp_path)]
    assert len(workers) == 2  # one for large bodies, one for the chat template
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + GUARD
    while {*workers} & {*children(process.pid)} and time.monotonic() < deadline:
        time.sleep(0.01)  # until the server has noticed
    statuses = [
        httpx.post(f"{url}/v1/completions", json=body, timeout=GUARD).status_code for _ in range(2)
    ]
    assert statuses == [200, 200], "an idle worker that died is replaced before the next body"
    process.send_signal(signal.SIGTERM)
    assert process.wait(GUARD) == 0
    assert not any(map(is_running, workers))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(
            {"model": "/nowhere"},
            "error: /nowhere: no such folder",
            marks=pytest.mark.exhaustive,
        ),
        ({"max_model_len": 1}, "error: unusable/config.json: no such architecture"),
    ],
)
def test_unloadable_model_prints_one_line(start, options, words):
    process = start(**options)
    assert process.wait(GUARD) == 1
    out, err = process.communicate()
    assert out == "" and err.strip().splitlines()[-1].startswith(words)
    assert "Traceback" not in err


@pytest.mark.exhaustive
def test_port_in_use_prints_one_line_immediately(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = start(port=other.getsockname()[1])
        assert process.wait(GUARD) == 1
    err = process.communicate()[1]
    assert "cannot listen on this address" in err and "--port" in err and "Traceback" not in err
    assert not (tmp_path / "journal").exists()


@pytest.mark.exhaustive
def test_signal_while_loading_stops_everything(start, tmp_path):
    process = start()
    while not (tmp_path / "journal").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.wait(GUARD) == 0
    out, err = process.communicate()
    assert "Traceback" not in err
    pid = engine_pid(tmp_path)
    deadline = time.monotonic() + GUARD
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


@pytest.mark.exhaustive
def test_ipv6_address_is_printed_in_brackets(start):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    url = url_of(start(host="::1"))
    assert url.startswith("http://[::1]:") and httpx.get(f"{url}/health").status_code == 200


@pytest.mark.exhaustive
def test_text_processes_do_not_load_torch(start, tmp_path, docs_5m, monkeypatch):
    """If the tokenizer is recorded: neither the server nor its workers, which render a chat."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_record(record_path(docs_5m), docs_5m, AutoTokenizer.from_pretrained(docs_5m))
    process = start(worker=True)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    reply = httpx.post(f"{url_of(process)}/v1/chat/completions", json=body, timeout=GUARD)
    assert reply.status_code == 200, reply.text
    texts = {*children(process.pid)} - {engine_pid(tmp_path)}
    assert len(texts) == 2
    for pid in (process.pid, *texts):
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "tokenizers" in mapped and "libtorch" not in mapped
