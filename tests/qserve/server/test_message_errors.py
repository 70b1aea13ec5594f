"""Anthropic messages: what is refused, and failures of the engine."""

import pytest

from qserve.config import ServerConfig
from tests.qserve.server.messages_api import (
    BASE,
    WEATHER,
    ask,
    events_of,
    refused,
)
from tests.qserve.server.test_messages import INVALID, result, text, turn, use


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("broken", "status", "kind"),
    [
        ({"fails_at": 0}, 500, "api_error"),
        ({"dies_at": 0}, 529, "overloaded_error"),
        ({"breaks_at": 0}, 500, "api_error"),
    ],
)
def test_engine_failures(server, stream, broken, status, kind):
    for name, value in broken.items():
        setattr(server.client, name, value)
    found = refused(ask(server, stream=stream), status, kind)
    assert "0xdeadbeef" not in found


def test_stream_that_fails_ends_with_an_error_event(server):
    server.client.fails_at = 2
    last = events_of(ask(server, stream=True))[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert last["request_id"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: required, but missing. Add the field."),
        ({"max_tokens": -1}, "max_tokens: expected 0 or more, found -1"),
        ({"model": None}, "model: required, but missing. Add the field."),
        ({"messages": []}, "messages: expected at least one message"),
        ({"messages": [turn("tool", "x")]}, "messages.0.role"),
        (
            {"messages": [turn("user", text("a"), IMAGE)]},
            "messages.0.content.1: the model 'tiny' reads",
        ),
        (
            {"messages": [turn("user", result([IMAGE]))]},
            "messages.0.content.0.content.0: the model",
        ),
        ({"messages": [turn("user", PDF)]}, "messages.0.content.0.source: expected a source of"),
        ({"messages": [turn("user", {"type": "text"})]}, "messages.0.content.0.text: "),
        ({"messages": [turn("user", {"type": "odd"})]}, "messages.0.content.0: expected a block"),
        ({"messages": [turn("user", use())]}, "messages.0: expected blocks of type tool_use only"),
        ({"messages": [turn("user", "a"), turn("assistant", use())]}, "messages.1: `tool_use` ids"),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens: expected 1024"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens: expected 1024 or more, found none"),
        ({"temperature": 9}, "temperature: expected 0 to 2"),
        ({"stop_sequences": [""]}, "stop_sequences.0: expected a text that is not empty"),
        ({"stop_sequences": ["a"] * 40}, "stop_sequences: expected at most 32"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name: duplicate name get_weather"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: expected 1 to 128"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: expected a JSON schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0.input_schema: "),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "need Anthropic's servers"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: bash_20250124 is"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: requires tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name: expected"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice: expected one of the tools get_weather, found g",
        ),
        ({"tools": [WEATHER]}, "tool_choice"),  # "auto" needs a parser
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"messages": [turn("user", "word " * 3000)]}, "prompt is too long: 30"),
    ],
)
def test_invalid_requests_are_refused(server, fields, words):
    body = {name: value for name, value in (BASE | fields).items() if value is not None}
    assert words in refused(server.post("/v1/messages", body), 400, INVALID)
    assert not server.client.requests


def test_refused_schema_names_the_tool_of_the_body(server):
    """A tool that the server skips counts, too."""
    bad = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"$ref": "#/x"}}}}
    tools = [{"type": "web_search_20250305", "name": "w"}, bad]
    found = refused(ask(server, tools=tools, tool_choice={"type": "any"}), 400, INVALID)
    assert found.startswith("tools.1.input_schema of f: ")


def test_errors_of_the_server(make_server):
    config = {"served_model_name": ["tiny"], "max_body_bytes": 300}
    server = make_server(ServerConfig(**config, max_requests_per_minute=3))
    refused(ask(server, model="other"), 404, "not_found_error")
    refused(ask(server, system="s" * 300), 413, "request_too_large")
    refused(server.request("POST", "/v1/messages", content=b"{"), 400, INVALID)
    limited = ask(server)
    refused(limited, 429, "rate_limit_error")
    assert int(limited.headers["retry-after"]) >= 1
    refused(server.get("/v1/messages"), 405, INVALID)
    refused(server.get("/v1/messages/batches"), 404, "not_found_error")
    version = {"anthropic-version": "2023-06-01"}
    refused(server.get("/v1/organizations", headers=version), 404, "not_found_error")
    assert server.request("HEAD", "/v1/messages").content == b""
    assert server.request("HEAD", "/").status_code == 200


def test_stopping_server_returns_overloaded(make_server):
    server = make_server(ServerConfig(served_model_name=["tiny"]), is_stopping=lambda: True)
    reply = ask(server)
    refused(reply, 529, "overloaded_error")
    assert reply.headers["retry-after"]
