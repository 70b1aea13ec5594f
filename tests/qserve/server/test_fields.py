"""Fields beyond the usual: usage as it grows, names of requests, cut prompts, what is ignored."""

import json
import logging
import re

import pytest

from qserve.params.sampling_params import SamplingParams
from qserve.server.requests.completions import completion_job
from qserve.server.requests.job import Arrival


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_continuous_usage_grows_with_each_chunk(server, chunks, route):
    call = getattr(server, route)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = chunks(call(stream=True, stream_options=options, n=2, max_tokens=4))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and counts[-1] == 8 and set(counts) >= set(range(1, 9))
    for part in parts:
        usage = part["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_continuous_usage_works_without_final_usage(server, chunks):
    options = {"continuous_usage_stats": True}
    streamed = chunks(server.chat(stream=True, stream_options=options, max_tokens=3))
    assert [c["usage"]["completion_tokens"] for c in streamed] == [0, 1, 2, 3]
    assert all(c["choices"] for c in streamed)


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_limit_beyond_the_context_is_refused(server, error, route):
    limit = server.client.max_model_len
    for name in ("max_tokens", "max_completion_tokens"):
        body = error(getattr(server, route)(**{name: limit + 1}), 400)
        assert body["param"] == name and str(limit) in body["message"]
        assert getattr(server, route)(**{name: limit}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 56}, slice(-200, None)),
        ({"truncate_prompt_tokens": 255}, slice(-255, None)),
    ],
)
def test_prompt_is_cut(server, fields, kept):
    token_ids = list(range(10, 1010))
    reply = server.complete(prompt=token_ids, **fields)
    assert server.client.requests[0][1] == token_ids[kept]
    assert reply.json()["usage"]["prompt_tokens"] == len(token_ids[kept])


def test_text_that_is_too_long_is_cut_and_not_refused(server):
    text = "word " * 5000
    assert server.complete(prompt=text, truncate_prompt_tokens=5).status_code == 200
    assert server.client.requests[0][1] == server.tokenizer.encode(text)[-5:]
    messages = [{"role": "user", "content": text}]
    assert server.chat(messages=messages, truncate_prompt_tokens=5).status_code == 200
    assert server.client.requests[1][1] == server.tokenizer.encode_chat(messages)[-5:]


@pytest.mark.parametrize("value", [0, -2, 256, "5"])
def test_truncation_out_of_range_is_refused(server, error, value):
    body = error(server.complete(truncate_prompt_tokens=value), 400)
    assert body["param"] == "truncate_prompt_tokens"


def test_last_of_many_stop_strings_stops(server):
    stop = [f"<{index}>" for index in range(31)] + ["general"]
    for call in (server.complete, server.chat):
        choice = call(stop=stop).json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (text, choice["stop_reason"]) == ("Hello there, ", "general")


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_token_ids_are_returned(server, chunks, route):
    call = getattr(server, route)
    (choice,) = call(return_token_ids=True).json()["choices"]
    prompt = server.client.requests[0][1]
    script = [*server.tokenizer.encode(server.client.text), 2]
    assert choice["prompt_token_ids"] == prompt and choice["token_ids"] == script
    streamed = [c["choices"][0] for c in chunks(call(return_token_ids=True, stream=True))]
    assert [c["prompt_token_ids"] for c in streamed] == [prompt] + [None] * (len(streamed) - 1)
    assert [token for c in streamed for token in c["token_ids"]] == script
    assert "token_ids" not in call().json()["choices"][0]
    if route == "chat":  # where vLLM's clients look for them
        assert call(return_token_ids=True).json()["prompt_token_ids"] == prompt
        first, *later = chunks(call(return_token_ids=True, stream=True))
        assert first["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in chunk for chunk in later)
        assert "prompt_token_ids" not in call().json()


def test_tokens_of_logprobs_can_be_ids(server):
    script = server.tokenizer.encode(server.client.text)
    fields = {"return_tokens_as_token_ids": True}
    found = server.complete(logprobs=1, **fields).json()["choices"][0]["logprobs"]
    expected = [f"token_id:{token}" for token in script]
    assert found["tokens"] == expected
    plain = server.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert found["text_offset"] == plain["text_offset"]
    content = server.chat(logprobs=True, **fields).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == expected


def test_chat_can_have_the_tokenizers_own_special_tokens(server, monkeypatch):
    monkeypatch.setattr(type(server.tokenizer), "special_affixes", ([7], [8, 9]))
    for value in (None, False, True):
        assert server.chat(add_special_tokens=value).status_code == 200
    without, same, with_them = (request[1] for request in server.client.requests)
    assert without == same and with_them == [7, *without, 8, 9]


def test_special_affixes_equal_encode(tokenizer):
    before, after = tokenizer.special_affixes
    assert [*before, *tokenizer.encode("a b", False), *after] == tokenizer.encode("a b", True)


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_request_is_named_by_its_header_its_body_or_the_server(server, route):
    call = getattr(server, route)
    named = {"x-request-id": "mine-1"}

    def post(body: dict, headers: dict):
        path = {"complete": "/v1/completions", "chat": "/v1/chat/completions"}[route]
        fields = {"prompt": "a"} if route == "complete" else {"messages": [MESSAGE]}
        return server.post(path, fields | body, headers=headers)

    for body, headers, expected in (
        ({}, named, "mine-1"),
        ({"request_id": "other"}, named, "mine-1"),
        ({"request_id": "other"}, {}, "other"),
    ):
        reply = post(body, headers)
        assert reply.headers["x-request-id"] == expected
        assert reply.json()["id"].partition("-")[2] == expected
    reply = call()
    assert reply.json()["id"].endswith(reply.headers["x-request-id"])
    # Two requests with the same name run together: the engine gives each its own name.
    assert len({request[0] for request in server.client.requests}) == 4


MESSAGE = {"role": "user", "content": "a"}


def test_invalid_request_id_is_not_used(server, error):
    for name in ("", "x" * 129, "a b", "a\tb", "h\u00e4"):
        headers = {"x-request-id": name.encode("latin-1")}
        reply = server.get("/health", headers=headers)
        assert len(reply.headers["x-request-id"]) == 32
        assert error(server.complete(request_id=name), 400)["param"] == "request_id"
    assert error(server.complete(request_id=5), 400)["param"] == "request_id"


def test_errors_and_streams_are_named_too(server):
    headers = {"x-request-id": "n1"}
    for path in ("/nothing", "/v1/completions", "/health"):
        assert server.get(path, headers=headers).headers["x-request-id"] == "n1"
    body = {"prompt": "a", "stream": True}
    reply = server.post("/v1/completions", body, headers=headers)
    assert reply.headers["x-request-id"] == "n1" and '"id":"cmpl-n1"' in reply.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_fields_without_effect_are_reported(server, caplog, route, stream):
    caplog.set_level(logging.INFO)
    call = getattr(server, route)
    assert "x-ignored-fields" not in call(stream=stream).headers
    fields = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    reply = call(stream=stream, **fields, cache_me=True, nothing=None)
    assert reply.status_code == 200
    named = reply.headers["x-ignored-fields"].split(", ")
    assert sorted(named) == sorted([*fields, "cache_me"])
    assert "cache_me" in caplog.text


def test_nested_ignored_fields_are_reported(server):
    options = {"include_usage": True, "include_obfuscation": False}
    messages = [{**MESSAGE, "refusal": "x"}, {**MESSAGE, "refusal": "y"}]
    reply = server.chat(stream=True, stream_options=options, messages=messages)
    assert reply.headers["x-ignored-fields"] == (
        "stream_options.include_obfuscation, messages.refusal"
    )


def test_names_of_ignored_fields_cannot_break_a_header(server):
    fields = {"a\r\nset-cookie: x": 1, "\u4e16": 1, "n" * 500: 1, "fine": 1}
    reply = server.complete(**fields)
    assert reply.headers["x-ignored-fields"] == "fine, ..."
    many = server.complete(**{f"f{i}": 1 for i in range(1000)})
    assert len(json.dumps(dict(many.headers))) < 1000


def test_priority_is_reported_if_policy_ignores_it(server):
    assert "x-ignored-fields" not in server.complete(priority=3).headers
    object.__setattr__(server.app.state.service, "priority_counts", False)
    assert server.complete(priority=3).headers["x-ignored-fields"] == "priority"
    assert "x-ignored-fields" not in server.complete(priority=0).headers


def test_parameters_are_checked_once_for_all_prompts_that_leave_room(server, monkeypatch):
    """1,000 prompts took 40 ms for that."""
    made, original = [], SamplingParams.__post_init__

    def counted(params):
        made.append(params)
        original(params)

    monkeypatch.setattr(SamplingParams, "__post_init__", counted)
    model = server.app.state.service.model
    length = model.max_model_len
    prompts = [[5], [5, 6], [7] * (length - 4), [8] * (length - 2), [9] * (length - 4)]
    body = json.dumps({"prompt": prompts, "max_tokens": 9}).encode()
    job = completion_job(model, body, Arrival(time=0.0))
    assert [params.max_tokens for params in job.params] == [9, 9, 4, 2, 4]
    assert len(made) == 3, "one for each length of an answer"
    choice = job.choice(0)[1]
    assert choice is job.params[0] and len(made) == 3


@pytest.mark.parametrize("number", ["6.0", "6.00", "60e-1", "0.6E1"])
def test_integers_may_be_written_as_floats(server, number):
    body = f'{{"prompt": [[5.0, 6]], "max_tokens": {number}, "logit_bias": {{"7": 1.0}}}}'
    reply = server.request("POST", "/v1/completions", content=body)
    assert reply.status_code == 200, reply.text
    _, prompt, params = server.client.requests[0]
    assert (prompt, params.max_tokens, params.logit_bias) == ([5, 6], 6, ((7, 1.0),))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": "1.0", "max_tokens": 6.5}', "max_tokens"),
        ('{"prompt": "1.0", "max_tokens": "6.0"}', "max_tokens"),
        ('{"prompt": "1.0", "n": 1e300}', "n"),
        ('{"prompt": "1.0", "n": 1e999}', "n"),
        ('{"prompt": "1.0", "stream": 1.0}', "stream"),
        ('{"prompt": "1.0",', None),
    ],
)
def test_non_integer_numbers_are_refused(server, error, body, param):
    assert error(server.request("POST", "/v1/completions", content=body), 400)["param"] == param


@pytest.mark.parametrize("path", ["completions", "chat/completions", "rerank"])
def test_missing_field_is_named_with_the_remedy(server, path):
    message = server.post(f"/v1/{path}", {}).json()["error"]["message"]
    assert re.fullmatch(r"\w+: required, but missing\. Add the field\.", message)
