"""Operators' settings: rate limits, deadlines, CORS, a proxy's path, TLS, Unix sockets, logs."""

import contextlib
import json
import logging
import os
import socket
import ssl
import subprocess
import threading
import warnings

import httpx
import openai
import pytest

from formats.errors import InputError
from qserve.commands.client_http import ServerClient
from qserve.config import EngineConfig, ServerConfig
from qserve.processes import logs
from qserve.server.http import listener
from qserve.server.http.http_protocol import Connections
from qserve.server.http.rate_limit import LimitRate
from qserve.server.serve import serve
from qserve.server.web_server import tls_options, uvicorn_config

COMPLETIONS = "/v1/completions"
MODEL = "examples/models/docs-5m"


def test_requests_beyond_rate_get_429(make_server, error):
    server = make_server(ServerConfig(max_requests_per_minute=2, api_key=["a", "b"]))
    body = {"prompt": "x", "max_tokens": 1}

    def post(key):
        return server.post(COMPLETIONS, body, headers={"Authorization": f"Bearer {key}"})

    assert [post("a").status_code for _ in range(3)] == [200, 200, 429]
    refusal = post("a")
    seconds = int(refusal.headers["retry-after"])
    assert 1 <= seconds <= 30
    problem = error(refusal, 429)
    assert problem["type"] == "rate_limit_error"
    assert problem["message"].endswith(f"Try again in {seconds} s.")
    assert post("b").status_code == 200 and post("wrong").status_code == 401
    headers = {"Authorization": "Bearer a"}
    assert server.get("/v1/models", headers=headers).status_code == 200


def test_bucket_fills_evenly_and_clients_are_forgotten(monkeypatch):
    now = 0.0
    limit = LimitRate(None, 6, by_key=False, now=lambda: now)
    assert [limit._take("a") for _ in range(7)] == [0, 0, 0, 0, 0, 0, 10.0]
    now = 5.0
    assert limit._take("a") == 5.0
    now = 10.0
    assert limit._take("a") == 0.0 and limit._take("a") == 10.0
    now = 1000.0
    assert [limit._take("a") for _ in range(7)].count(0.0) == 6
    monkeypatch.setattr("qserve.server.http.rate_limit.MAX_BUCKETS", 3)
    for client in ("b", "c"):
        limit._take(client)
    now = 2000.0
    limit._take("d")
    assert set(limit._buckets) == {"d"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_header", [False, True])
def test_reply_beyond_deadline_is_408(make_server, error, stream, by_header):
    server = make_server(ServerConfig(request_timeout=60.0 if by_header else 0.05))
    server.client.delay = 30.0
    headers = {"x-request-timeout": "0.05"} if by_header else {}
    body = {"prompt": "a", "stream": stream, "n": 2}
    reply = server.post(COMPLETIONS, body, headers=headers)
    assert "0.05 s" in error(reply, 408)["message"]
    assert reply.headers["x-should-retry"] == "false"
    assert not server.client.running and len(server.client.aborted) == 2
    assert server.app.state.service.admission.held == (0, 0)


def test_stream_beyond_its_deadline_ends_with_an_error(make_server, chunks):
    server = make_server(ServerConfig(request_timeout=1.0))  # some tokens come on a busy machine
    server.client.endless, server.client.delay = True, 0.1
    streamed = chunks(server.chat(stream=True))
    assert streamed[-1]["error"]["code"] == 408 and len(streamed) > 2
    assert not server.client.running


def test_invalid_deadline_is_refused(server, error):
    for text in ("0", "-1", "nan", "inf", "soon", ""):
        headers = {"x-request-timeout": text}
        body = error(server.post(COMPLETIONS, {"prompt": "a"}, headers=headers), 400)
        assert body["param"] == "x-request-timeout"
    headers = {"x-request-timeout": "30"}
    assert server.post(COMPLETIONS, {"prompt": "a"}, headers=headers).status_code == 200


PREFLIGHT = {
    "Origin": "https://a.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_cors_is_off_by_default(server, error):
    refused = server.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    error(refused, 403)
    reply = server.get("/health", headers={"Origin": "https://a.example"})
    for each in (refused, reply):
        assert not any(name.startswith("access-control") for name in each.headers)


def test_cors_of_one_origin(make_server):
    server = make_server(ServerConfig(allowed_origins=["https://a.example"], api_key=["k"]))
    reply = server.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in reply.headers["access-control-allow-headers"]
    other = PREFLIGHT | {"Origin": "https://b.example"}
    assert (
        "access-control-allow-origin"
        not in server.request("OPTIONS", COMPLETIONS, headers=other).headers
    )
    refused = server.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_proxy_path_prefix(make_server, error):
    """With the prefix, as some proxies send it, and without, as others do."""
    server = make_server(ServerConfig(root_path="/llm", api_key=["k"]))
    key = {"Authorization": "Bearer k"}
    for prefix in ("", "/llm"):
        assert server.get(f"{prefix}/health").status_code == 200
        error(server.get(f"{prefix}/v1/models"), 401)
        assert server.get(f"{prefix}/v1/models", headers=key).status_code == 200
        missing = error(server.get(f"{prefix}/nothing", headers=key), 404)
        assert missing["message"] == ("Not Found: GET /llm/nothing. GET /docs shows the routes.")
    error(server.get("/llmhealth"), 401)
    for path in ("/openapi.json", "/llm/openapi.json"):
        assert server.get(path, headers=key).json()["servers"] == [{"url": "/llm"}]
    for wrong in ("llm", "/", "/llm/"):
        with pytest.raises(InputError, match="--root-path"):
            ServerConfig(root_path=wrong)


@pytest.mark.parametrize("is_stripped", [False, True])
def test_server_behind_a_proxy(make_server, run_live, is_stripped):
    """Over HTTP, under the prefix alone, as a proxy hands it on; nothing of it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server = make_server(ServerConfig(root_path="/llm/a", served_model_name=["tiny"]))
    inner = server.app

    async def proxy(scope, receive, send):
        assert scope["path"].startswith("/llm/a")
        if is_stripped:
            path = scope["path"].removeprefix("/llm/a")
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await inner(scope, receive, send)

    server.app = proxy
    base = f"http://127.0.0.1:{run_live(server)}/llm/a"
    with openai.OpenAI(base_url=f"{base}/v1", api_key="-") as client:
        assert client.models.list().data[0].id == "tiny"
        assert client.models.retrieve("tiny").id == "tiny"
        reply = client.completions.create(model="tiny", prompt="Hi")
        assert reply.choices[0].text == server.client.text
    with httpx.Client() as http:
        assert "<html" in http.get(f"{base}/").text
        if not is_stripped:  # what is left of it is an empty path, or the page's own
            moved = http.get(base)
            assert (moved.status_code, moved.headers["location"]) == (307, "/llm/a/")
        counted = http.get(f"{base}/metrics").text
    assert 'handler="/v1/completions",status="200"' in counted


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    files = [str(folder / name) for name in ("cert.pem", "key.pem")]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]),
        ],
        check=True,
        capture_output=True,
    )
    return files


@pytest.fixture
def run_on():
    """run_on(server, config): the server runs at the settings' address until the test ends."""
    ends = []

    def run(server, config):
        import uvicorn

        owned = contextlib.ExitStack()
        owned.enter_context(listener.owned_path(config.uds))
        bound = listener.bind(config)
        owned.callback(listener.remove, config.uds)
        options = tls_options(config)
        web = uvicorn.Server(uvicorn_config(server.app, Connections(limit=100), **options))
        thread = threading.Thread(target=web.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        ends.append((web, thread, owned, config.uds))
        while not web.started:
            thread.join(0.01)
        return listener.address(bound, tls=config.ssl_certfile is not None)

    yield run
    for web, thread, owned, path in ends:
        web.should_exit = web.force_exit = True
        thread.join(10)
        owned.close()
        assert path is None or not os.path.exists(path)


def test_https(make_server, run_on, certificate):
    config = ServerConfig(port=0, ssl_certfile=certificate[0], ssl_keyfile=certificate[1])
    listener.check_tls(config)
    url = run_on(make_server(config), config)
    assert url.startswith("https://127.0.0.1:")
    with pytest.raises(InputError, match="cannot be trusted.*SSL_CERT_FILE"):
        ServerClient(url).get("/models")
    trust = ssl.create_default_context(cafile=certificate[0])
    body = {"prompt": "a", "stream": True}
    with httpx.Client(verify=trust, base_url=url) as client:
        assert client.post(COMPLETIONS, json=body).text.endswith("data: [DONE]\n\n")
        # answered before the body is read, which over TLS cannot half-close
        client.headers["Content-Type"] = "application/json"
        assert client.post(COMPLETIONS, content=b"x" * 2**20).status_code == 400
        assert client.post(COMPLETIONS, content=b"x" * 2**24).status_code == 413


def test_clients_without_certificate_are_refused(make_server, run_on, certificate):
    config = ServerConfig(
        port=0,
        ssl_certfile=certificate[0],
        ssl_keyfile=certificate[1],
        ssl_ca_certs=certificate[0],
    )
    url = run_on(make_server(config), config)
    trust = ssl.create_default_context(cafile=certificate[0])
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url}/health", verify=trust)
    trust.load_cert_chain(*certificate)
    assert httpx.get(f"{url}/health", verify=trust).status_code == 200


def test_unusable_certificates_are_refused(tmp_path, certificate):
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    for options in (
        {"ssl_certfile": "/nowhere.pem"},
        {"ssl_certfile": str(broken)},
        {"ssl_certfile": certificate[0]},  # without its key
        {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1], "ssl_ca_certs": "/no"},
        {"ssl_keyfile": certificate[1]},
    ):
        with pytest.raises(InputError, match="--ssl"):
            listener.check_tls(ServerConfig(**options))


def test_port_is_bound_during_model_load():
    """The second server learns it before it loads its model, not when it starts to listen."""
    with listener.bind(ServerConfig(port=0)) as first:
        with pytest.raises(InputError, match="cannot listen on this address"):
            listener.bind(ServerConfig(port=first.getsockname()[1]))
        listener.allow_restart(first)
        first.listen()
        with pytest.raises(InputError, match="cannot listen on this address"):
            listener.bind(ServerConfig(port=first.getsockname()[1]))


def test_port_with_time_wait_connections_is_usable(make_server, run_on):
    with listener.bind(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        listener.allow_restart(first)
        first.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            first.accept()[0].close()  # this side closes first, so its connection times out later
            assert client.recv(1) == b""
    config = ServerConfig(port=port)
    assert httpx.get(f"{run_on(make_server(config), config)}/health").status_code == 200


def test_unix_socket(make_server, run_on, tmp_path):
    path = str(tmp_path / "s")
    config = ServerConfig(uds=path)
    with socket.socket(socket.AF_UNIX) as left:  # by a server that was killed
        left.bind(path)
    assert run_on(make_server(config), config) == f"unix:{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as client:
        assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
    with pytest.raises(InputError, match="cannot listen on this address"):
        listener.bind(config)
    with pytest.raises(InputError, match="already in use"), listener.owned_path(path):
        pass
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="--uds"):
        listener.bind(ServerConfig(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


def test_second_server_on_a_unix_socket_is_refused_while_the_first_loads(tmp_path, root_logger):
    """The first server's socket is bound and does not listen yet, as that of a killed server."""
    path = str(tmp_path / "s")
    config = ServerConfig(uds=path)
    with listener.owned_path(path), listener.bind(config) as first:
        with pytest.raises(InputError, match=f"{path}: cannot listen.*already in use"):
            serve(EngineConfig(model=MODEL), config, engine="no.such.engine")
        first.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)  # the file is still the first server's
    # Both files are still there, as after a kill, but the lock is free.
    (tmp_path / "s.lock").touch()
    with listener.owned_path(path), listener.bind(config):
        listener.remove(path)
    assert not list(tmp_path.iterdir())


def test_other_files_at_the_path_of_a_unix_socket_are_kept(tmp_path, root_logger):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(InputError, match="already in use"):
            serve(EngineConfig(model=MODEL), ServerConfig(uds=path), engine="no.such.engine")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    assert [each.name for each in tmp_path.iterdir()] == ["s"]


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = handlers, level


def test_log_lines_as_json(root_logger, capsys):
    logs.configure("warning", "json")
    logging.getLogger("a.b").info("not shown")
    try:
        raise ValueError('a "quoted" cause\nof two lines')
    except ValueError:
        logging.getLogger("a.b").exception("request %s failed", "é\n5")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    entry = json.loads(lines[0])
    assert (entry["level"], entry["logger"]) == ("error", "a.b")
    assert entry["message"] == "request é\n5 failed" and "quoted" in entry["exception"]
    assert entry["time"].endswith("Z") and "T" in entry["time"]


def test_child_processes_use_same_log_format(root_logger, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    logs.add_arguments(parser)
    found = parser.parse_args(logs.arguments("error", "json"))
    assert (found.log_level, found.log_format) == ("error", "json")
    found = parser.parse_args([])
    logs.configure(found.log_level, found.log_format)
    logging.getLogger("x").info("shown")
    assert capsys.readouterr().err == "INFO x: shown\n"


def test_metrics_under_vllms_prefix(make_server):
    server = make_server(ServerConfig(metrics_prefix="vllm"))
    text = server.get("/metrics").text
    assert "\nvllm:num_requests_running{" in text and "qserve:" not in text
