"""The API key: what it guards, and which keys there can be."""

import pytest

from formats.errors import InputError
from qserve.config import ServerConfig
from qserve.server.http.api_key import Keys, load_keys

COMPLETIONS = "/v1/completions"
KEY = {"Authorization": "Bearer s3cret"}


@pytest.fixture
def guarded(make_server):
    return make_server(ServerConfig(served_model_name=["tiny"], api_key=["s3cret"]))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "bearer s3cret",
        "Bearer  s3cret",
        "Bearer s3cretx",
        "Bearer s3cre",
        "Basic s3cret",
        "s3cret",
    ],
)
def test_every_route_except_probes_requires_key(guarded, error, header):
    headers = {} if header is None else {"Authorization": header}
    schema = guarded.get("/openapi.json", headers=KEY).json()
    routes = [(path, method) for path, methods in schema["paths"].items() for method in methods]
    assert len(routes) == 41
    others = ("/v1/nothing", "/v1", "/openapi.json", "/health/", "/metrics/", "/docs/")
    for path, method in [*routes, *((path, "get") for path in others)]:
        reply = guarded.request(method.upper(), path, headers=headers)
        if path in ("/health", "/ready", "/ping"):
            assert reply.status_code == 200
        elif path.startswith("/v1/messages"):
            assert (reply.status_code, reply.json()["type"]) == (401, "error")
            assert reply.json()["error"]["type"] == "authentication_error"
        else:
            assert error(reply, 401)["type"] == "authentication_error"
            assert "s3cret" not in reply.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "s3cret"}, 200),
        ({"x-api-key": "s3cret", "authorization": "Bearer outdated"}, 200),
        ({"x-api-key": "outdated", "authorization": "Bearer s3cret"}, 200),
        ({"x-api-key": "Bearer s3cret"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "outdated", "authorization": "Bearer outdated"}, 401),
    ],
)
def test_one_valid_key_in_two_headers_is_enough(make_server, headers, status):
    server = make_server(ServerConfig(api_key=["s3cret"], max_requests_per_minute=1))
    assert server.get("/v1/models", headers=headers).status_code == status
    first, second = (server.post(COMPLETIONS, {"prompt": "a"}, headers=headers) for _ in "ab")
    # The rate limit counts by key, whichever header it comes in.
    assert (first.status_code, second.status_code) == ((200, 429) if status == 200 else (401, 401))


def test_key_grants_access_in_one_header(guarded, error):
    for path in ("/v1/models", "/metrics"):
        assert guarded.get(path, headers=KEY).status_code == 200
    body = {"prompt": "a"}
    assert guarded.post(COMPLETIONS, body, headers=KEY).status_code == 200
    twice = [("authorization", "Bearer s3cret"), ("authorization", "Bearer other")]
    error(guarded.get("/v1/models", headers=twice), 401)
    error(guarded.request("OPTIONS", COMPLETIONS), 405)


def test_non_ascii_key(make_server, error):
    server = make_server(ServerConfig(api_key=["schlüssel"]))
    header = "Bearer schlüssel".encode()
    assert server.get("/v1/models", headers={b"authorization": header}).status_code == 200
    error(server.get("/v1/models", headers={b"authorization": b"Bearer \xff"}), 401)


@pytest.mark.parametrize("key", ["", " ", " s3cret", "s3cret\n"])
def test_unsendable_key_is_refused_at_start(key):
    with pytest.raises(InputError, match="--api-key: expected a key") as caught:
        ServerConfig(api_key=[key])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("key", ["s3\x00cret", "s3\ncret", "s3cret\x7f!", "s3cret\udcff"])
def test_key_that_no_header_can_hold_is_refused_at_start(key):
    with pytest.raises(InputError, match="--api-key: has a key with control") as caught:
        ServerConfig(api_key=[key])
    assert "cret" not in str(caught.value)
    with pytest.raises(InputError, match="KEYS: has a key with control characters or bytes"):
        load_keys(ServerConfig(api_key_env="KEYS"), {"KEYS": key})


def test_keys_come_from_the_command_line_a_file_and_the_environment(make_server, error, tmp_path):
    path = tmp_path / "keys"
    path.write_text("# who: what for\nk2\n\nk3\n")
    config = ServerConfig(api_key=["k1"], api_key_file=str(path), api_key_env="MY_KEYS")
    assert load_keys(config, {"MY_KEYS": "k4,k5"}) == ("k1", "k2", "k3", "k4", "k5")
    assert load_keys(ServerConfig(), {"QSERVE_API_KEY": "k"}) == ("k",)
    assert load_keys(ServerConfig(), {}) == ()
    server = make_server(config)
    for key, status in (("k1", 200), ("k2", 200), ("k3", 200), ("k4", 401), ("", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert server.get("/v1/models", headers=headers).status_code == status


def test_byte_order_mark_is_no_part_of_a_key(tmp_path):
    """Editors on Windows write one; no client could send that key."""
    path = tmp_path / "keys"
    path.write_text("k1\nschlüssel\n", encoding="utf-8-sig")
    assert load_keys(ServerConfig(api_key_file=str(path)), {}) == ("k1", "schlüssel")


def test_unusable_key_file_is_refused(tmp_path):
    path = tmp_path / "keys"
    for text in (None, "", "# nothing\n", "secret \n"):
        if text is not None:
            path.write_text(text)
        with pytest.raises(InputError, match="keys") as caught:
            load_keys(ServerConfig(api_key_file=str(path)), {})
        assert "secret" not in str(caught.value)
    with pytest.raises(InputError, match="QSERVE_API_KEY"):
        load_keys(ServerConfig(), {"QSERVE_API_KEY": " s"})


def test_vllm_key_variable_gives_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    assert not Keys(ServerConfig())
    assert "VLLM_API_KEY is set but not read" in caplog.text and "s3cret" not in caplog.text
    caplog.clear()
    assert Keys(ServerConfig(api_key=["other"])) and Keys(ServerConfig(api_key_env="VLLM_API_KEY"))
    assert not caplog.text
