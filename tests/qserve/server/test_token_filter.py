"""allowed_token_ids and bad_words over HTTP: what reaches the engine, what is a 400."""

import json

import pytest


def params_of(server):
    return [request[2] for request in server.client.requests]


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_token_filter_reaches_engine(server, tokenizer, route):
    fields = {"allowed_token_ids": [5, 6, 5], "bad_words": ["trait", "not there"], "n": 2}
    assert getattr(server, route)(**fields).status_code == 200
    expected = {
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for text in ("trait", " trait", "not there", " not there")
    }
    assert len(expected) == 4
    for params in params_of(server):
        assert params.allowed_token_ids == (5, 6, 5)
        assert set(params.bad_words_token_ids) == expected
    assert len(params_of(server)) == 2


def test_responses_accept_token_filter(server):
    body = {"input": "Hi", "allowed_token_ids": [5], "bad_words": ["a"]}
    assert server.post("/v1/responses", body).status_code == 200
    (params,) = params_of(server)
    assert params.allowed_token_ids == (5,) and params.bad_words_token_ids


def test_token_filter_applies_to_every_prompt(server):
    assert server.complete(prompt=["a", "b"], bad_words=["c"]).status_code == 200
    first, second = params_of(server)
    assert first.bad_words_token_ids == second.bad_words_token_ids != ()


def test_null_and_empty_token_filter_are_ignored(server):
    assert server.complete(allowed_token_ids=None, bad_words=[]).status_code == 200
    (params,) = params_of(server)
    assert not params.has_filter


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [8192]},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": ["5"]},
        {"allowed_token_ids": [1] * (2**14 + 1)},
        {"bad_words": "a"},
        {"bad_words": ["a", ""]},
        {"bad_words": ["  "]},
        {"bad_words": ["a" * 257]},
        {"bad_words": ["a"] * 257},
        {"bad_words": [5]},
    ],
)
def test_invalid_token_filter_is_a_400(server, error, fields):
    for call in (server.complete, server.chat):
        assert error(call(**fields), 400)["param"].startswith(next(iter(fields)))
    assert not server.client.requests


def test_partial_character_is_a_400(server, error):
    body = json.dumps({"prompt": "a", "bad_words": ["\ud800"]})
    error(server.request("POST", "/v1/completions", content=body), 400)


def test_grammar_out_of_memory_is_a_503(server, error, chunks):
    server.client.fails_at, server.client.fails_as_asked, server.client.fails_for_now = (
        2,
        True,
        True,
    )
    reply = server.complete()
    assert "deadbeef" in error(reply, 503)["message"] and reply.headers["retry-after"]
    assert chunks(server.complete(stream=True))[-1]["error"]["code"] == 503


def test_no_allowed_token_is_reported_to_client(server, error, chunks):
    server.client.fails_at, server.client.fails_as_asked = 2, True
    assert "deadbeef" in error(server.complete(), 400)["message"]
    assert chunks(server.complete(stream=True))[-1]["error"]["code"] == 400
