"""The whole server in its own process, with an engine process that needs no model."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from qserve.server.app import SHUTDOWN_GRACE

HERE = Path(__file__).resolve().parent
STEP_FAILS, PROCESS_DIES, STEP_IS_SLOW = 101, 102, 104  # of fake_engine
PROGRAM = """
import sys
from formats.errors import InputError
from qserve.config import EngineConfig, ServerConfig
from qserve.server import app
app.SHUTDOWN_GRACE = float(sys.argv[5])
config = ServerConfig(host=sys.argv[2], port=int(sys.argv[3]), served_model_name="tiny")
try:
    engine_config = EngineConfig(model=sys.argv[1], max_model_len=int(sys.argv[4]))
    sys.exit(app.serve(engine_config, config, engine="fake_engine:FakeEngine"))
except InputError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture
def start(tmp_path, docs_5m):
    """Start a server; the processes that a test leaves are killed."""
    started = []

    def run(model=docs_5m, host="127.0.0.1", port=0, max_model_len=2048, grace=SHUTDOWN_GRACE):
        path = os.pathsep.join([str(HERE.parent), str(HERE.parents[2])])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "FAKE_ENGINE_JOURNAL": str(tmp_path / "journal"),
        }
        options = map(str, (model, host, port, max_model_len, grace))
        command = [sys.executable, "-c", PROGRAM, *options]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_running_requests_finish_after_sigterm_and_no_process_is_left(start, tmp_path):
    process = start()
    url = url_of(process)
    assert httpx.get(f"{url}/health").status_code == 200
    replies = []
    body = {"prompt": [1], "max_tokens": 400}
    thread = threading.Thread(
        target=lambda: replies.append(httpx.post(f"{url}/v1/completions", json=body, timeout=20))
    )
    thread.start()
    while "add cmpl" not in (tmp_path / "journal").read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    thread.join()
    assert replies[0].json()["usage"]["completion_tokens"] == 400
    assert process.wait(10) == 0
    assert not is_running(engine_pid(tmp_path))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert "Traceback" not in process.stderr.read()


def test_interrupt_from_the_terminal_reaches_the_server_alone(start, tmp_path):
    """Ctrl-C goes to every process of the group; the engine must outlive the running requests."""
    process = start()
    url = url_of(process)
    replies = []
    body = {"prompt": [1], "max_tokens": 300}
    thread = threading.Thread(
        target=lambda: replies.append(httpx.post(f"{url}/v1/completions", json=body, timeout=20))
    )
    thread.start()
    while "add cmpl" not in (tmp_path / "journal").read_text():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    thread.join()
    assert replies[0].json()["usage"]["completion_tokens"] == 300
    assert process.wait(10) == 0


def test_second_signal_drops_what_runs(start, tmp_path):
    process = start()
    url = url_of(process)
    body = {"prompt": [STEP_IS_SLOW], "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(SHUTDOWN_GRACE - 2) == 0, process.stderr.read()
    assert not is_running(engine_pid(tmp_path))


def test_what_runs_too_long_after_sigterm_ends_with_an_error(start, tmp_path):
    process = start(grace=0.5)
    url = url_of(process)
    body = {"prompt": [STEP_IS_SLOW], "max_tokens": 2000, "n": 2}
    wholes = []
    thread = threading.Thread(
        target=lambda: wholes.append(httpx.post(f"{url}/v1/completions", json=body, timeout=20))
    )
    thread.start()
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        *_, error, end = (line for line in lines if line)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert end == "data: [DONE]"
    thread.join()
    assert wholes[0].status_code == 503 and wholes[0].json()["error"]["code"] == 503
    assert process.wait(10) == 0
    assert "Traceback" not in process.stderr.read()
    assert not is_running(engine_pid(tmp_path))


def test_half_a_body_at_the_end_is_hung_up_on(start, tmp_path):
    process = start(grace=0.3)
    address = httpx.URL(url_of(process))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=10) as client:
        client.sendall(head + b"{")
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1000) == b""
        assert process.wait(10) == 0
    assert "Traceback" not in process.stderr.read()
    assert not is_running(engine_pid(tmp_path))


@pytest.mark.parametrize("token", [STEP_FAILS, PROCESS_DIES])
def test_dead_engine_fails_the_requests_and_ends_the_server(start, token):
    process = start()
    url = url_of(process)
    body = {"prompt": [token], "max_tokens": 50}
    reply = httpx.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "The engine has ended; the server is stopping."
    assert process.wait(10) == 1
    assert "The engine died" in process.stderr.read()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/nowhere"}, "error: /nowhere/config.json: not found"),
        ({"max_model_len": 1}, "error: unusable/config.json: no such architecture"),
    ],
)
def test_model_that_cannot_be_loaded_is_one_line(start, options, words):
    process = start(**options)
    assert process.wait(20) == 1
    out, err = process.communicate()
    assert out == "" and err.strip().splitlines()[-1].startswith(words)
    assert "Traceback" not in err


def test_port_in_use_is_one_line_at_once(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = start(port=other.getsockname()[1])
        assert process.wait(20) == 1
    err = process.communicate()[1]
    assert "cannot be listened on" in err and "--port" in err and "Traceback" not in err
    assert not (tmp_path / "journal").exists()


def test_signal_while_loading_stops_everything(start, tmp_path):
    process = start()
    while not (tmp_path / "journal").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    out, err = process.communicate()
    assert "Traceback" not in err
    pid = engine_pid(tmp_path)
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def test_ipv6_address_is_printed_in_brackets(start):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    url = url_of(start(host="::1"))
    assert url.startswith("http://[::1]:") and httpx.get(f"{url}/health").status_code == 200
