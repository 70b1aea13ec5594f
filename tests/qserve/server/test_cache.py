"""The prefix cache as HTTP clients see it: cached tokens, salts, and emptying it."""

import pytest

from qserve.config import ServerConfig

ROUTES = ("complete", "chat")


@pytest.mark.parametrize("route", ROUTES)
def test_usage_reports_cached_tokens(server, chunks, route):
    server.client.num_cached = 3
    call = getattr(server, route)
    for n in (1, 2):  # outputs of one prompt count once
        usage = call(n=n).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    *_, last = chunks(call(stream=True, stream_options={"include_usage": True}))
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_each_prompt_counts_what_its_first_output_found(server):
    server.client.num_cached = 3
    usage = server.complete(prompt=["alpha", "beta"], n=3).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


@pytest.mark.parametrize("route", ROUTES)
def test_salt_and_priority_reach_the_engine(server, route):
    assert getattr(server, route)(cache_salt="mine", priority=-3).status_code == 200
    (options,) = server.client.request_options
    assert (options.cache_salt, options.priority) == ("mine", -3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("cache_salt", "x" * 257),
        ("priority", 2**31),
        ("priority", "high"),
        ("priority", 0.5),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_invalid_salt_or_priority_is_refused(server, route, field, value):
    reply = getattr(server, route)(**{field: value})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field
    assert not server.client.request_options


def test_keys_salt_separately_if_configured(make_server):
    server = make_server(ServerConfig(cache_salt_by_key=True))
    for key, salt in (("a", "s"), ("b", "s"), ("a", "t"), ("a", "s"), ("as", "")):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "Once"} | ({"cache_salt": salt} if salt else {})
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
    salts = [options.cache_salt for options in server.client.request_options]
    assert salts[0] == salts[3] and len(set(salts)) == 4
    assert not any("Bearer" in salt for salt in salts), "no key goes to the engine"


def test_cache_reset_route_requires_permission(make_server):
    refused = make_server(ServerConfig())
    assert refused.post("/reset_prefix_cache", {}).status_code == 404
    assert refused.client.num_resets == 0
    server = make_server(ServerConfig(enable_cache_reset=True))
    assert server.post("/reset_prefix_cache", {}).status_code == 200
    assert server.client.num_resets == 1
    server.client.is_alive = False
    assert server.post("/reset_prefix_cache", {}).status_code == 503
