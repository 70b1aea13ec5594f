"""Bad requests: each gets its status and a small error reply, and affects no other request."""

import json

import pytest

from formats.errors import InputError
from qserve.config import ServerConfig
from qserve.params.generation_defaults import load_defaults
from qserve.server.app import build_app
from qserve.server.http.errors import ApiError
from qserve.server.requests import responses, unsupported

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


DEEP = b"[" * 100_000


@pytest.fixture(autouse=True)
def nothing_left_running(server):
    """After every bad request the server must still answer a good one."""
    yield
    server.client.is_alive, server.client.refuses = True, False
    server.client.fails_at = server.client.breaks_at = server.client.dies_at = None
    assert server.complete().status_code == 200
    assert not server.client.running


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"17",
        b'"text"',
        b"[]",
        b'{"prompt": "a"',
        b"\xff\xfe{}",
        b'{"prompt": "\xc3("}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        DEEP,
        b'{"prompt": ' + DEEP + b"}",
        b'{"x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"temperature": 1' + b"0" * 5000 + b"}",
        b'{"n": 1' + b"0" * 5000 + b"}",
        b"{}",
    ],
)
def test_invalid_bodies_are_refused(server, error, path, body):
    headers = {"content-type": "application/json"}
    error(server.request("POST", path, content=body, headers=headers), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "x"])
def test_other_content_type_is_refused(server, error, kind):
    headers = {"content-type": kind}
    error(server.request("POST", COMPLETIONS, content=b'{"prompt":"a"}', headers=headers), 415)


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity"])
def test_compressed_body_is_refused_as_compressed(server, error, encoding):
    headers = {"content-encoding": encoding}
    reply = server.request("POST", COMPLETIONS, content=b"\x1f\x8b\x08", headers=headers)
    assert encoding in error(reply, 415)["message"]
    plain = {"content-encoding": "Identity"}
    reply = server.request("POST", COMPLETIONS, content=b'{"prompt":"a"}', headers=plain)
    assert reply.status_code == 200


def test_json_with_charset_or_without_content_type_is_accepted(server):
    for headers in ({"content-type": "Application/JSON; charset=utf-8"}, {}):
        reply = server.request("POST", COMPLETIONS, content=b'{"prompt":"a"}', headers=headers)
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("seed", 2**63),
        ("seed", "1"),
        ("n", 0),
        ("n", -1),
        ("n", 10**9),
        ("n", 10**30),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("min_tokens", 999),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 33),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [8192]),
        ("stop_token_ids", "5"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
        ("ignore_eos", 1),
    ],
)
def test_invalid_field_error_names_field(server, error, field, value):
    for call in (server.complete, server.chat):
        body = error(call(**{field: value}), 400)
        assert body["param"].split(".")[0] == field
        assert field in body["message"]
    assert not server.client.requests


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "boss", "content": "a"}, "user, assistant, tool, found 'boss'"),
        ({"role": "user", "content": 5}, "image_url and video_url, found 5"),
        ({"role": "b" * 10**6, "content": "a"}, "assistant, tool, found 'bbb"),
    ],
)
def test_invalid_value_is_shown_in_error(server, error, message, text):
    found = error(server.post("/v1/chat/completions", {"messages": [message]}), 400)
    assert text in found["message"] and len(found["message"]) < 1000


def test_invalid_choice_error_lists_choices(server, error):
    found = error(server.complete(truncation_side="middle"), 400)
    assert found["message"].endswith("'left' or 'right', found 'middle' (use one of these)")
    tool = {"type": "web_search", "function": {"name": "f"}}
    found = error(server.chat(tools=[tool]), 400)
    assert found["message"].endswith("'function', found 'web_search' (use one of these)")


@pytest.mark.parametrize("value", [0, -1, "5"])
def test_error_names_max_completion_tokens_if_given(server, error, value):
    for call in (server.complete, server.chat):
        body = error(call(max_completion_tokens=value, max_tokens=5), 400)
        assert body["param"] == "max_completion_tokens"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_nonfinite_numbers_are_refused(server, error, literal):
    body = b'{"prompt": "a", "temperature": ' + literal.encode() + b"}"
    headers = {"content-type": "application/json"}
    reply = server.request("POST", COMPLETIONS, content=body, headers=headers)
    assert error(reply, 400)["param"] == "temperature"


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        [1, "a"],
        ["a", 1],
        [[1], [2, "b"]],
        [True],
        [1.5],
        7,
        None,
        {},
    ],
)
def test_empty_or_mixed_prompts_are_refused(server, error, prompt):
    assert error(server.complete(prompt=prompt), 400)["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, 8192, 2**31, 2**63, 10**40])
def test_token_id_outside_the_vocabulary(server, error, token):
    for prompt in ([1, token], [[1], [token]]):
        body = error(server.complete(prompt=prompt), 400)
        assert body["param"] == "prompt" and str(token) in body["message"]
        assert "8191" in body["message"]


def test_too_many_prompts_are_refused_early(server, error):
    for count in (10**6, 1025):
        body = error(server.complete(prompt=["a"] * count), 400)
        assert body["param"] == "prompt" and str(count) in body["message"]
    assert error(server.complete(prompt=["a"] * 1000, n=2), 400)["param"] == "n"
    assert not server.client.requests


def test_many_invalid_items_give_one_short_error(server, error):
    error(server.complete(stop_token_ids=["x" * 100] * 50_000), 400)
    error(server.complete(stop=[5] * 50_000), 400)
    error(server.chat(messages=[{"role": 5}] * 50_000), 400)
    error(server.complete(stop=["y" * 500_000] * 5), 400)
    error(server.complete(model="m" * 500_000), 404)
    error(server.get("/v1/models/" + "m" * 15_000), 404)
    error(server.get("/" + "m" * 15_000), 404)
    error(server.get("/" + "m" * 50_000), 431)


def test_prompt_of_exactly_the_limit_and_around_it(server, error):
    limit = server.client.max_model_len
    assert server.complete(prompt=[5] * (limit - 1), max_tokens=9).status_code == 200
    assert server.client.requests[0][2].max_tokens == 1
    for length in (limit, limit + 1):
        body = error(server.complete(prompt=[5] * length), 400)
        assert body["message"].startswith(
            f"This model's maximum context length is {limit} tokens. "
            f"However, your prompt contains {length} input tokens"
        )
    long = [{"role": "user", "content": "word " * 300}]
    assert error(server.chat(messages=long), 400)["message"].startswith("This model's maximum")


def test_megabytes_of_text_are_refused_before_tokenizing(server, error, monkeypatch):
    def encode(*arguments):
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(server.tokenizer), "encode", encode)
    body = error(server.complete(prompt="word " * 1_000_000), 400)
    assert body["message"].startswith("This model's maximum context length is 256 tokens.")
    error(server.chat(messages=[{"role": "user", "content": "word " * 1_000_000}]), 400)
    monkeypatch.undo()


def test_body_above_limit_is_refused(make_server, error):
    server = make_server(ServerConfig(served_model_name=["tiny"], max_body_bytes=1000))
    assert server.complete(user="a" * 800).status_code == 200
    exact = b'{"prompt": "a"}'.ljust(1000)
    headers = {"content-type": "application/json"}
    for body, status in ((exact, 200), (exact + b" ", 413)):
        reply = server.request("POST", COMPLETIONS, content=body, headers=headers)
        assert reply.status_code == status
    for size in (1000, 7000, 50_000):
        assert "1000" in error(server.complete(prompt="a" * size), 413)["message"]


def test_unknown_model_is_refused_and_missing_model_is_default(server, error):
    for call in (server.complete, server.chat):
        body = error(call(model="gpt-9"), 404)
        assert "gpt-9" in body["message"] and body["param"] == "model"
        assert call(model="tiny").status_code == call(model=None).status_code == 200


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/", "POST", 405),
        ("/v1", "GET", 404),
        ("/v1/embeddings", "GET", 405),
        ("/v1/models/", "GET", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/models", "DELETE", 405),
        ("/health", "POST", 405),
        ("/v1/completions/", "POST", 404),
    ],
)
def test_unknown_route_or_method(server, error, path, method, status):
    reply = server.request(method, path)
    error(reply, status)
    assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize(
    ("field", "refused", "neutral"),
    [
        ("guided_json", {"type": "object"}, None),
        ("guided_regex", "a+", None),
        ("best_of", 2, 1),
        ("max_new_tokens", 5, None),
        ("regex", "a+", None),
        ("length_penalty", True, 1),
        ("logits_processors", ["x"], []),
        ("do_sample", False, True),
        ("lora_path", "sql", None),
        ("mm_processor_kwargs", {"max_pixels": 1}, {}),
        ("return_hidden_states", True, False),
        ("thinking_token_budget", 10, -1),
        ("vllm_xargs", {"a": 1}, {}),
        ("unknown_field", None, {"anything": [1]}),
    ],
)
def test_unsupported_fields_are_refused_by_name(server, error, field, refused, neutral):
    for call in (server.complete, server.chat):
        if refused is not None:
            body = error(call(**{field: refused}), 400)
            assert body["param"] == field and field in body["message"]
        assert call(**{field: neutral}).status_code == 200
        assert call(**{field: None}).status_code == 200


def test_best_of_equal_to_n_is_accepted(server):
    reply = server.complete(n=2, best_of=2)
    assert reply.status_code == 200 and len(reply.json()["choices"]) == 2


def test_fields_unsupported_on_one_route_are_refused(server, error):
    assert error(server.complete(suffix="x"), 400)["param"] == "suffix"
    assert server.complete(suffix="").status_code == 200
    for field, value in {
        "enable_thinking": False,
        "thinking": {"type": "disabled"},
        "functions": [{"name": "f"}],
        "chat_template": "{{ 1 }}",
        "web_search_options": {},
    }.items():
        assert error(server.chat(**{field: value}), 400)["param"] == field


@pytest.mark.parametrize(
    ("route", "field", "value", "hint"),
    [
        ("complete", "guided_regex", "a", 'structured_outputs: {"regex": ...}'),
        ("chat", "guided_json", {}, 'structured_outputs: {"json": ...}'),
        ("chat", "max_new_tokens", 5, "use max_tokens"),
        ("chat", "repeat_penalty", 1.1, "use repetition_penalty"),
        ("complete", "best_of", 3, "use_beam_search"),
        ("complete", "tools", [{}], "/v1/chat/completions"),
        ("complete", "lora_path", "sql", "use model: NAME of the adapter"),
        ("chat", "enable_thinking", False, 'chat_template_kwargs: {"enable_thinking": ...}'),
        ("chat", "functions", [{}], "use tools"),
        ("chat", "reasoning", {"effort": "low"}, "use reasoning_effort"),
        ("complete", "messages", [], "/v1/chat/completions"),
        ("chat", "prompt", "a", "/v1/completions"),
        ("complete", "top_logprobs", 2, "logprobs: N"),
    ],
)
def test_refusal_names_alternative(server, error, route, field, value, hint):
    assert hint in error(getattr(server, route)(**{field: value}), 400)["message"]


def test_every_refusal_has_a_remedy():
    for table in unsupported.TABLES.values():
        assert not table.keys() - unsupported.HINTS.keys()
    assert not unsupported.POOLING.keys() - unsupported.POOLING_HINTS.keys()
    assert not responses.REFUSED.keys() - responses.HINTS.keys()


def test_function_call_of_a_message_is_no_tool_choice(server, error):
    message = {"role": "assistant", "content": "x", "function_call": {"name": "f"}}
    found = error(server.chat(messages=[message]), 400)
    assert found["message"].startswith("messages.0.function_call is not supported by this server;")
    assert "use tool_calls" in found["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [5]}], "messages.0.content.0"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content.0",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{}]}],
            "messages.0.tool_calls.0.function",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
        (
            [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}],
            "messages.0",
        ),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages.0.function_call"),
    ],
)
def test_invalid_conversations_are_refused(server, error, messages, param):
    assert error(server.chat(messages=messages), 400)["param"] == param


@pytest.mark.parametrize("content", [None, 5, {"type": "text", "text": "a"}])
def test_invalid_content_error_lists_accepted_types(server, error, content):
    messages = [{"role": "user", "content": content}]
    body = error(server.chat(messages=messages), 400)
    assert body["message"].startswith("messages.0.content: expected text, or a list of parts")


def test_conflicting_conversation_endings_are_refused(server, error):
    error(server.chat(continue_final_message=True, add_generation_prompt=True), 400)


def test_template_exception_is_a_400(server, error, monkeypatch):
    backend = server.tokenizer._tokenizer
    monkeypatch.setattr(backend, "chat_template", "{{ raise_exception('no such role') }}")
    assert "no such role" in error(server.chat(), 400)["message"]
    monkeypatch.setattr(backend, "chat_template", None)
    assert "chat template" in error(server.chat(), 400)["message"]


def test_chat_template_settings(server, error, monkeypatch):
    """Names in the template are handed on, unknown ones ignored, the server's own refused."""
    template = "a{% if enable_thinking is defined and not enable_thinking %}b{% endif %}{{ level }}"
    monkeypatch.setattr(server.tokenizer._tokenizer, "chat_template", template)
    seen = []
    render = server.tokenizer.render_chat
    monkeypatch.setattr(
        server.tokenizer, "render_chat", lambda *a, **k: seen.append(render(*a, **k)) or seen[-1]
    )
    for settings in ({"enable_thinking": False, "level": 3}, {"level": "a"}):
        assert server.chat(chat_template_kwargs=settings).status_code == 200
    assert seen == ["ab3", "ab3", "aa", "aa"]  # with the text of messages, and with blanks
    for name, value in {"tokenize": True, "messages": [], "chat_template": "x"}.items():
        body = error(server.chat(chat_template_kwargs={"level": 1, name: value}), 400)
        assert body["param"] == f"chat_template_kwargs.{name}"
    for value in (1, [1], {"a": 1}):
        reply = server.chat(chat_template_kwargs={"level": 1, "tone": value})
        assert reply.headers["x-ignored-fields"] == "chat_template_kwargs.tone"
        assert seen[-1] == "a1"
    for value in ([1], {"a": 1}):
        body = error(server.chat(chat_template_kwargs={"level": value}), 400)
        assert body["param"] == "chat_template_kwargs.level"
    assert error(server.chat(chat_template_kwargs="x"), 400)["param"] == "chat_template_kwargs"
    for nothing in ({}, None):
        assert server.chat(chat_template_kwargs=nothing).status_code == 200


@pytest.mark.parametrize("text", ["a\x00b", "\x00", "\u2028\ufeff\u202e", "\ufffd", "<|im_end|>"])
def test_unusual_text_is_accepted(server, text):
    assert server.complete(prompt=text).status_code == 200
    assert server.chat(messages=[{"role": "user", "content": text}]).status_code == 200


def test_invalid_generation_config_stops_start(tmp_path, server, tokenizer, monkeypatch):
    path = tmp_path / "generation_config.json"
    for text in ('{"temperature": -1}', '{"temperature": "x"}', "[]", "{", "\udc80"):
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(InputError, match="generation_config.json"):
            load_defaults(tmp_path)
    path.unlink()
    assert load_defaults(tmp_path) == {}


def test_refusal_of_the_engine_is_a_400(server, error):
    server.client.refuses = True
    for stream in (False, True):
        message = error(server.complete(stream=stream), 400)["message"]
        assert message == "request: can never run"  # without the engine's id
        error(server.complete(n=3, stream=stream), 400)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("how", "status"), [("fails_at", 500), ("breaks_at", 500), ("dies_at", 503)]
)
def test_failure_before_the_first_token_is_an_http_error(server, error, how, status, stream):
    setattr(server.client, how, 0)
    reply = server.complete(stream=stream)
    assert "secret" not in error(reply, status)["message"]
    assert ("retry-after" in reply.headers) == (status == 503)


@pytest.mark.parametrize(("how", "code"), [("fails_at", 500), ("breaks_at", 500), ("dies_at", 503)])
@pytest.mark.parametrize("n", [1, 3])
def test_failure_in_mid_stream_is_an_event_and_then_done(server, chunks, how, code, n):
    setattr(server.client, how, 2)
    streamed = chunks(server.complete(stream=True, n=n))
    assert streamed[-1]["error"]["code"] == code and set(streamed[-1]) == {"error"}
    assert "secret" not in json.dumps(streamed)
    assert all("error" not in chunk for chunk in streamed[:-1]) and len(streamed) > 1
    assert not server.client.running


def test_dead_engine_returns_503_immediately(server, error):
    server.client.is_alive = False
    error(server.complete(), 503)
    error(server.chat(stream=True), 503)
    assert server.get("/v1/models").status_code == 200


def test_unexpected_error_text_is_not_exposed(server, error, monkeypatch):
    def explode(*arguments):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(type(server.tokenizer), "render_chat", explode)
    assert error(server.chat(), 500)["message"] == "Internal server error. See the server's log."


def test_error_message_with_surrogates_is_sent():
    assert b"folder ? is gone" in ApiError(500, "folder \udcff is gone", "Try again.").response.body


def test_app_can_be_built_without_running(tokenizer):
    app = build_app(None, tokenizer, ServerConfig(), max_num_seqs=1)
    assert app.state.service.tokenizer is tokenizer
