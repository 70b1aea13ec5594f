"""POST /v1/messages: what the model reads, the blocks and events of answers, and errors."""

import asyncio
import json

import jsonschema
import pytest

from qserve.config import ServerConfig
from qserve.server.anthropic import reply as anthropic_reply
from qserve.server.http import event_stream
from tests.qserve.server.messages_api import (
    BASE,
    CALL,
    WEATHER,
    ask,
    events_of,
    message,
    message_of,
    refused,
)

NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
INVALID = "invalid_request_error"
READS_ALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.get('reasoning_content', '') }}|{{ m.content }}"
    "{% for c in m.get('tool_calls', []) %}[{{ c.id }}:{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.tool_call_id }},{{ m.get('name') }}){% endif %}{% endfor %}"
    "{{ enable_thinking }},{{ reasoning_effort }}"
)
NO_LATER_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System messages must come first') }}{% endif %}{% endfor %}"
)


@pytest.fixture
def hermes(make_server):
    config = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    return make_server(ServerConfig(served_model_name=["tiny"], **config))


@pytest.fixture
def read(server, monkeypatch):
    """read(template, **fields) -> the text that the model reads."""
    computed = ("template_settings", "renders_later_system")

    def forget():
        for name in computed:
            server.tokenizer.__dict__.pop(name, None)

    def prompt(template=READS_ALL, **fields):
        monkeypatch.setattr(server.tokenizer._tokenizer, "chat_template", template)
        forget()
        message(ask(server, **fields))
        return server.tokenizer.decode(server.client.requests[-1][1], False)

    yield prompt
    forget()


def turn(role, *content):
    return {"role": role, "content": content[0] if isinstance(content[0], str) else [*content]}


def text(value, **fields):
    return {"type": "text", "text": value, **fields}


def use(call_id="toolu_1", name="get_weather", **arguments):
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(content, call_id="toolu_1", **fields):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def test_message_has_every_field(server):
    server.client.num_cached = 5
    found = message(ask(server, headers={"x-request-id": "abc"}))
    num_prompt = len(server.client.requests[0][1])
    num_output = len(server.tokenizer.encode(server.client.text)) + 1
    assert found == {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [text(server.client.text)],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "output_tokens": num_output,
        },
    }


def test_parameters_reach_the_engine(server):
    ask(server, temperature=0.5, top_p=0.25, top_k=7, stop_sequences=["zz"], max_tokens=9, seed=3)
    params = server.client.requests[0][2]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
    assert (params.stop, params.max_tokens, params.seed) == (("zz",), 9, 3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"stop_sequences": ["general", "reader"]}, "stop_sequence", "general"),
        ({"max_tokens": 2}, "max_tokens", None),
        ({}, "end_turn", None),
    ],
)
def test_stop_reasons(server, stream, fields, reason, sequence):
    reply = ask(server, stream=stream, **fields)
    found = message_of(events_of(reply)) if stream else message(reply)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def test_max_tokens_beyond_context_is_accepted(server):
    """Claude Code asks for 32,000 tokens of any model."""
    server.client.endless = True
    found = message(ask(server, max_tokens=32_000))
    assert found["stop_reason"] == "model_context_window_exceeded"
    assert found["usage"]["output_tokens"] == 256 - found["usage"]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_zero_max_tokens_fills_cache(server, stream):
    reply = ask(server, max_tokens=0, stream=stream)
    found = message_of(events_of(reply)) if stream else message(reply)
    assert (found["content"], found["stop_reason"]) == ([], "max_tokens")
    assert found["usage"]["output_tokens"] == 0 and len(server.client.requests) == 1


def test_conversation_renders_to_prompt(read):
    found = read(
        system=[text("x-anthropic-billing-header: cc_version=1; cch=ab;"), text("S1"), text("S2")],
        messages=[
            turn("user", "A"),
            turn("user", text("B", cache_control={"type": "ephemeral"})),
            turn(
                "assistant",
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("Look:"),
                use(city="Oslo"),
                use("toolu_2", "now"),
            ),
            turn(
                "user",
                text("and?"),
                result([text("3 C"), text("snow")]),
                result("noon", "toolu_2"),
            ),
        ],
    )
    assert found == (
        "<system>|S1\nS2<user>|A\nB"
        '<assistant>Hm|Look:[toolu_1:get_weather{"city": "Oslo"}][toolu_2:now{}]'
        "<tool>|3 C\nsnow(toolu_1,get_weather)<tool>|noon(toolu_2,now)<user>|and?,"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": "Error: down", "is_error": True}, "Error: down"),
        ({"content": "<tool_use_error>x</tool_use_error>", "is_error": True}, "<tool_use_error>"),
        ({"is_error": True}, "Error("),
        ({}, "|("),
        ({"content": [{"type": "tool_reference", "tool_name": "now"}]}, "|now("),
        (
            {
                "content": [
                    {"type": "search_result", "title": "T", "source": "u", "content": [text("c")]},
                    {"type": "document", "title": "D", "source": {"type": "text", "data": "d"}},
                ]
            },
            "|T\nu\nc\nD\nd(",
        ),
    ],
)
def test_tool_results(read, fields, expected):
    outcome = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
    history = [turn("user", "A"), turn("assistant", use()), turn("user", outcome)]
    assert expected in read(messages=history)


def test_later_system_turns_stay_where_the_template_renders_them(read):
    history = [turn("user", "A"), turn("system", "Be brief."), turn("user", "B")]
    assert read(messages=history, system="S").startswith(
        "<system>|S<user>|A<system>|Be brief.<user>|B"
    )
    found = read(NO_LATER_SYSTEM + READS_ALL, messages=history, system="S")
    assert found.startswith("<system>|S\nBe brief.<user>|A\nB")
    assert read(messages=[turn("system", "first"), *history]).startswith("<system>|first<user>")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ","),
        ({"thinking": {"type": "adaptive"}}, "True,"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True,"),
        ({"thinking": {"type": "disabled"}}, "False,"),
        ({"output_config": {"effort": "high"}}, "True,high"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, "False,low"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "False,"),
    ],
)
def test_thinking_sets_template_setting(read, fields, expected):
    assert read(**fields) == f"<user>|Hi{expected}"


def test_assistant_prefill_is_continued(server):
    history = [turn("user", "Hi"), turn("assistant", "Hello")]
    message(ask(server, messages=history))
    prompt = server.client.requests[0][1]
    assert server.tokenizer.decode(prompt, False).endswith("assistant\nHello")
    message(ask(server, messages=[*history[:1], turn("assistant", text(""))]))
    assert server.client.requests[1][1] == server.tokenizer.encode_chat(
        [{"role": "user", "content": "Hi"}]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_text(hermes, stream):
    hermes.client.text = f"Let me look.\n{CALL}\n\n{CALL}\n"
    reply = ask(hermes, tools=[WEATHER, NOW], stream=stream)
    found = message_of(events_of(reply)) if stream else message(reply)
    said, *calls = found["content"]
    assert said["type"] == "text" and said["text"].strip() == "Let me look."
    assert [(c["type"], c["name"], c["input"]) for c in calls] == [
        ("tool_use", "get_weather", {"city": "Oslo"})
    ] * 2
    assert all(c["id"].startswith("toolu_") for c in calls) and calls[0]["id"] != calls[1]["id"]
    assert found["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "script", "names"),
    [
        ({"type": "any"}, '[{"name": "now", "parameters": {}}]', ["now"]),
        ({"type": "tool", "name": "get_weather"}, '{"city": "x"}', ["get_weather"]),
    ],
)
def test_forced_tool_calls(server, stream, choice, script, names):
    server.client.text = script
    reply = ask(server, tools=[WEATHER, NOW], tool_choice=choice, stream=stream)
    found = message_of(events_of(reply)) if stream else message(reply)
    assert [block["name"] for block in found["content"]] == names
    assert found["stop_reason"] == "tool_use"
    schema = json.loads(server.client.requests[0][2].structured_outputs.json)
    jsonschema.validate(json.loads(script), schema)


def test_disabled_parallel_calls_give_one_call(hermes):
    hermes.client.text = CALL + CALL
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(message(ask(hermes, tools=[WEATHER], tool_choice=choice))["content"]) == 1
    hermes.client.text = "No."
    found = message(ask(hermes, tools=[WEATHER], tool_choice={"type": "none"}))
    assert found["content"] == [text("No.")]


@pytest.mark.parametrize("stream", [False, True])
def test_call_cut_by_the_limit_has_its_complete_values(hermes, stream):
    hermes.client.text = CALL
    count = len(hermes.tokenizer.encode(CALL[: CALL.index("Oslo")]))
    reply = ask(hermes, tools=[WEATHER], max_tokens=count, stream=stream)
    if stream:
        assert events_of(reply)[-2]["delta"]["stop_reason"] == "max_tokens"
        return
    found = message(reply)
    assert found["content"][0]["input"] == {} and found["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_is_a_block(make_server, stream, display):
    server = make_server(ServerConfig(served_model_name=["tiny"], reasoning_parser="deepseek_r1"))
    server.client.text = "Let me see.</think>\n\nYes."
    thinking = {"type": "adaptive", "display": display}
    reply = ask(server, thinking=thinking, stream=stream)
    found = message_of(events_of(reply)) if stream else message(reply)
    thought, said = found["content"]
    shown = "Let me see." if display == "summarized" else ""
    assert thought == {"type": "thinking", "thinking": shown, "signature": thought["signature"]}
    assert thought["signature"] and said["text"].strip() == "Yes."
    assert found["usage"]["output_tokens_details"]["thinking_tokens"] > 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", ["", "\n", "Only thoughts"])
def test_reply_has_a_text_block(make_server, stream, script):
    server = make_server(ServerConfig(served_model_name=["tiny"], reasoning_parser="deepseek_r1"))
    server.client.text = script
    reply = ask(server, stream=stream)
    found = message_of(events_of(reply)) if stream else message(reply)
    assert found["content"][-1] == text("")
    assert len(found["content"]) == 1 + (script == "Only thoughts")


def test_reply_follows_output_schema(server):
    form = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        message(ask(server, **fields))
        asked = server.client.requests[-1][2].structured_outputs
        assert json.loads(asked.json) == WEATHER["input_schema"]


def test_fields_without_effect_are_accepted_and_reported(hermes):
    fields = {
        "betas_of_tomorrow": 1,
        "context_management": {"edits": []},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "tools": [WEATHER | {"defer_loading": True, "eager_input_streaming": True}]
        + [{"type": "web_search_20250305", "name": "web_search"}],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b-2026-01-01"}
    reply = ask(hermes, path="/v1/messages?beta=true", headers=headers, **fields)
    message(reply)
    ignored = reply.headers["x-ignored-fields"].split(", ")
    assert {"betas_of_tomorrow", "thinking.budget_tokens", "tools.1"} <= {*ignored}
    assert not {"metadata", "context_management", "service_tier"} & {*ignored}


def test_count_tokens_equals_prompt_tokens(hermes):
    fields = {"system": [text("S")], "tools": [WEATHER], "thinking": {"type": "adaptive"}}
    body = {name: value for name, value in BASE.items() if name != "max_tokens"}
    reply = hermes.post("/v1/messages/count_tokens", body | fields)
    assert not hermes.client.requests
    message(ask(hermes, **fields))
    assert reply.json() == {"input_tokens": len(hermes.client.requests[0][1])}


def test_stream_begins_and_pings_before_the_first_token(server, monkeypatch, run_live):
    """Clients that reach the server through a gateway give up on a silent connection."""
    monkeypatch.setattr(anthropic_reply, "START_SECONDS", 0.02)
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.02)
    server.client.delay = 0.5
    events = events_of(ask(server, stream=True, max_tokens=2))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds.count("ping") > 4
    between = kinds[kinds.index("content_block_delta") : kinds.index("message_delta")]
    assert "ping" in between
    found = message_of(events)
    assert found["usage"]["output_tokens"] == 2 and found["content"][0]["text"]


def test_early_disconnect_aborts_request(server, monkeypatch):
    """Before the first token, where the stream has begun with nothing but pings."""
    monkeypatch.setattr(anthropic_reply, "START_SECONDS", 0.02)
    server.client.delay = 30.0
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/messages",
        "raw_path": b"/v1/messages",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }

    async def run():
        began, body = asyncio.Event(), json.dumps(BASE | {"stream": True}).encode()
        inbox = [{"type": "http.request", "body": body}]

        async def receive():
            if inbox:
                return inbox.pop()
            await began.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if b"message_start" in message.get("body", b""):
                began.set()

        await asyncio.wait_for(server.app(scope, receive, send), 20)

    asyncio.run(run())
    assert not server.client.running and len(server.client.aborted) == 1


def test_models_in_openai_and_anthropic_forms(make_server):
    server = make_server(ServerConfig(served_model_name=["claude-local", "tiny"]))
    assert server.get("/v1/models").json()["object"] == "list"
    version = {"anthropic-version": "2023-06-01"}
    page = server.get("/v1/models?limit=1", headers=version).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, *["claude-local"] * 2)
    rest = server.get("/v1/models?after_id=claude-local", headers=version).json()
    assert [each["id"] for each in rest["data"]] == ["tiny"] and not rest["has_more"]
    one = server.get("/v1/models/tiny", headers=version).json()
    assert (one["type"], one["display_name"], one["max_input_tokens"]) == ("model", "tiny", 256)
    refused(server.get("/v1/models/x", headers=version), 404, "not_found_error")
    refused(server.get("/v1/models?limit=0", headers=version), 400, INVALID)
    refused(server.get("/v1/models?before_id=x", headers=version), 400, INVALID)
