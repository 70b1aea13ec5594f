"""A server without keys: what web pages of other sites may not do, and what clients still may."""

import pytest

from formats.errors import InputError
from qserve.config import ServerConfig
from qserve.server.http import foreign_pages

COMPLETIONS = "/v1/completions"
BODY = b'{"prompt": "Once", "max_tokens": 1}'


def status(server, path=COMPLETIONS, content=BODY, **headers) -> int:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.request("POST", path, content=content, headers=headers).status_code


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "[::1]:8000", "10.0.0.7", "192.168.1.20:80", "[fe80::1]"),
        *("localhost:8000", "LOCALHOST", "llm.localhost", "localhost.", "qserve:8000", "x"),
        *("workstation.local:8000", "qserve.ml.svc.cluster.local", "host.docker.internal:8000"),
    ],
)
def test_hosts_without_a_site_are_accepted(server, host):
    assert status(server, Host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example."),
        *("local.example", "evil.example@localhost", "localhost:80.evil.example", "a.internal.com"),
    ],
)
def test_dns_rebinding_host_is_refused(server, error, host):
    """Its pages would be of the server's own origin, as far as the browser knows."""
    origin = f"http://{host}"
    reply = server.request("POST", COMPLETIONS, content=BODY, headers={"Host": host})
    assert "--allowed-hosts" in error(reply, 403)["message"]
    assert status(server, Host=host, Origin=origin, Sec_Fetch_Site="same-origin") == 403
    assert server.get("/v1/models", headers={"Host": host}).status_code == 403
    assert server.get("/health", headers={"Host": host}).status_code == 200  # probes
    assert not server.client.requests


def test_allowed_hosts_are_accepted(make_server, monkeypatch):
    monkeypatch.setattr(foreign_pages.socket, "gethostname", lambda: "Node7.example.org")
    given = {"host": "front.example.net", "allowed_hosts": ["LLM.example.com", "*.example.io"]}
    server = make_server(ServerConfig(**given))
    for host in (
        *("node7.example.org:8000", "front.example.net", "llm.example.com:443"),
        *("a.example.io", "a.b.example.io"),
    ):
        assert status(server, Host=host) == 200, host
    for host in ("example.io", "other.example.com", "node8.example.org", "a.example.io.evil.com"):
        assert status(server, Host=host) == 403, host
    assert status(make_server(ServerConfig(allowed_hosts=["*"])), Host="evil.example") == 200
    assert status(make_server(ServerConfig(uds="/socket")), Host="llm.example.com") == 200


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "file://"),
        *("https://localhost:8000.evil.example", "chrome-extension://abc", "localhost:8000"),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
def test_pages_of_other_origins_are_refused(server, error, origin, kind):
    """For example a fetch in mode no-cors, which sends no preflight request."""
    headers = {"Host": "localhost:8000", "Origin": origin, "Content-Type": kind}
    reply = server.request("POST", COMPLETIONS, content=BODY, headers=headers)
    assert "--allowed-origins" in error(reply, 403)["message"]
    reply = server.request("POST", "/ping", headers=headers | {"Sec-Fetch-Site": "same-site"})
    assert reply.status_code == 200  # open to all
    assert status(server, path="/reset_prefix_cache", **headers) == 403
    assert not server.client.requests


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1", "http://127.0.0.1"),
        ("127.0.0.1:80", "http://127.0.0.1"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("workstation.local", "https://workstation.local"),  # a proxy speaks HTTPS
    ],
)
def test_own_page_is_accepted(server, host, origin):
    assert status(server, Host=host, Origin=origin) == 200


def test_own_page_behind_host_changing_proxy_is_accepted(server):
    names = {"Host": "127.0.0.1:8000", "Origin": "https://llm.example.com"}
    assert status(server, Sec_Fetch_Site="same-origin", **names) == 200
    assert status(server, Sec_Fetch_Site="cross-site", **names) == 403


def test_allowed_origins_are_accepted(make_server):
    server = make_server(ServerConfig(allowed_origins=["https://a.example"]))
    assert status(server, Host="localhost", Origin="https://a.example") == 200
    assert status(server, Host="localhost", Origin="https://b.example") == 403
    for wrong in ("a.example", "https://a.example/", "https://a.example/x", '["*"]', ""):
        with pytest.raises(InputError, match="--allowed-origins: expected an origin"):
            ServerConfig(allowed_origins=[wrong])
    for fine in ("http://localhost:3000", "http://[::1]:80", "chrome-extension://abc", "null"):
        assert ServerConfig(allowed_origins=[fine]).allowed_origins == [fine]
    server = make_server(ServerConfig(allowed_origins=["*"]))
    assert status(server, Host="localhost", Origin="https://b.example") == 200


def test_key_overrides_origin_check(make_server):
    server = make_server(ServerConfig(api_key=["k"]))
    names = {"Host": "llm.example.com", "Origin": "https://chat.example"}
    assert status(server, **names) == 401
    assert status(server, Authorization="Bearer k", **names) == 200


@pytest.mark.parametrize(
    "kind", ["", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded"]
)
def test_body_requires_json_content_type(server, error, kind):
    """A Blob without a type has none."""
    headers = {"Content-Type": kind}
    reply = server.request("POST", COMPLETIONS, content=BODY, headers=headers)
    assert "Content-Type: application/json" in error(reply, 415)["message"]
    assert status(server, Content_Type="application/json; charset=utf-8") == 200
