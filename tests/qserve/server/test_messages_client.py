"""The official `anthropic` package against /v1/messages, and the requests of Claude Code."""

import asyncio
import json
import time

import httpx
import pydantic
import pytest

from qserve.config import ServerConfig
from tests.qserve.server.messages_api import CALL, WEATHER, events_of, message_of

HI = [{"role": "user", "content": "Hi"}]
ASKED = {"model": "tiny", "max_tokens": 100, "messages": HI}
SECRET = "s3cret"


@pytest.fixture(scope="module")
def anthropic():
    """The package, which takes seconds to import: not where other files' tests run."""
    import anthropic

    return anthropic


@pytest.fixture
def served(make_server, run_live):
    """A server with a key and a parser of calls, and its URL."""
    config = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    config |= {"served_model_name": ["tiny"], "api_key": [SECRET]}
    server = make_server(ServerConfig(**config))
    return server, f"http://127.0.0.1:{run_live(server)}"


@pytest.fixture
def client(served, anthropic):
    with anthropic.Anthropic(base_url=served[1], api_key=SECRET, max_retries=0) as client:
        yield client


def test_message_and_its_tokens(served, client):
    server, _ = served
    found = client.messages.create(**ASKED, system="Be brief.", stop_sequences=["general"])
    assert found.content[0].text == "Hello there, " and found.stop_reason == "stop_sequence"
    assert found.stop_sequence == "general" and found.usage.output_tokens > 2
    assert found._request_id == found.id.removeprefix("msg_")
    counted = client.messages.count_tokens(model="tiny", messages=HI, system="Be brief.")
    assert counted.input_tokens == found.usage.input_tokens == len(server.client.requests[0][1])
    (model,) = client.models.list()
    assert model.id == client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("of_beta", [False, True])
def test_stream_with_its_helpers(served, client, of_beta):
    served[0].client.text = f"Let me look.\n{CALL}\n{CALL}"
    messages = client.beta.messages if of_beta else client.messages
    betas = {"betas": ["interleaved-thinking-2025-05-14"]} if of_beta else {}
    with messages.stream(**ASKED, tools=[WEATHER], **betas) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "text" in kinds
    said, *calls = found.content
    assert said.text.strip() == "Let me look." and found.stop_reason == "tool_use"
    assert [(c.name, c.input) for c in calls] == [("get_weather", {"city": "Oslo"})] * 2
    with client.messages.stream(**ASKED, tools=[WEATHER]) as stream:
        assert "".join(stream.text_stream) == said.text


def test_tool_runner_calls_until_there_is_an_answer(served, client, anthropic):
    server, _ = served
    server.client.text = CALL

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Look outside.

        Args:
            city: Name of a city.
        """
        server.client.text = "It snows."
        return f"snow in {city}"

    runner = client.beta.messages.tool_runner(**ASKED, tools=[get_weather])
    final = runner.until_done()
    assert final.content[0].text == "It snows." and len(server.client.requests) == 2
    prompt = server.tokenizer.decode(server.client.requests[1][1])
    assert "snow in Oslo" in prompt


def test_parsed_answer(served, client):
    class City(pydantic.BaseModel):
        name: str

    served[0].client.text = '{"name": "Oslo"}'
    found = client.messages.parse(**ASKED, output_format=City)
    assert found.parsed_output == City(name="Oslo")
    assert "name" in served[0].client.requests[0][2].structured_outputs.json


def test_async_client(served, anthropic):
    async def run():
        async with anthropic.AsyncAnthropic(base_url=served[1], auth_token=SECRET) as client:
            whole = await client.messages.create(**ASKED)
            async with client.messages.stream(**ASKED) as stream:
                streamed = await stream.get_final_message()
            counts = await asyncio.gather(
                *(client.messages.count_tokens(model="tiny", messages=HI) for _ in range(8))
            )
        return whole, streamed, {count.input_tokens for count in counts}

    whole, streamed, counts = asyncio.run(run())
    assert whole.content[0].text == streamed.content[0].text and whole.usage == streamed.usage
    assert counts == {whole.usage.input_tokens}


@pytest.mark.parametrize(
    ("fields", "kind", "name"),
    [
        ({"stop_sequences": [""]}, "BadRequestError", "invalid_request_error"),
        ({"model": "other"}, "NotFoundError", "not_found_error"),
    ],
)
def test_errors_of_requests(client, fields, kind, name, anthropic):
    with pytest.raises(getattr(anthropic, kind)) as found:
        client.messages.create(**ASKED | fields)
    assert found.value.body["error"]["type"] == name and found.value.request_id


def test_errors_of_the_server(make_server, run_live, served, anthropic):
    server, url = served
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**ASKED)
    small = make_server(ServerConfig(max_body_bytes=200, max_requests_per_minute=2))
    base = f"http://127.0.0.1:{run_live(small)}"
    with anthropic.Anthropic(base_url=base, api_key="-", max_retries=0) as client:
        with pytest.raises(anthropic.APIStatusError) as found:
            client.messages.create(**ASKED, system="s" * 200)
        assert found.value.status_code == 413 and found.value.type == "request_too_large"
        small.client.is_alive = False
        with pytest.raises(anthropic.APIStatusError) as found:
            client.messages.create(**ASKED)
        assert found.value.status_code == 529 and found.value.type == "overloaded_error"
        with pytest.raises(anthropic.RateLimitError):
            client.messages.create(**ASKED)


def test_error_in_a_stream_is_raised(served, client, anthropic):
    served[0].client.fails_at = 3
    with pytest.raises(anthropic.APIStatusError), client.messages.stream(**ASKED) as stream:
        list(stream.text_stream)


def test_requests_of_claude_code(served):
    """Probe, models, a title, parallel counts, many tools, a cancelled stream, results."""
    server, url = served
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
        "fine-grained-tool-streaming-2025-05-14,context-management-2025-06-27",
        "x-claude-code-session-id": "5b2c",
        "authorization": f"Bearer {SECRET}",
        "x-api-key": "outdated",
    }
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools = [
        {"name": f"mcp__server__tool_{index}", "description": "d" * 300, "defer_loading": True}
        | {"input_schema": WEATHER["input_schema"] | {"$schema": "http://json-schema.org/x#"}}
        for index in range(100)
    ]
    body = {
        "model": "tiny",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": "Use tools.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Today</system-reminder>"},
                    {"type": "text", "text": "Oslo?", **cached},
                ],
            }
        ],
        "tools": [*tools, WEATHER],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": json.dumps({"session_id": "x"})},
    }
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:

        def post(path="/v1/messages?beta=true", **fields):
            return http.post(path, json=body | fields)

        assert http.head("/").status_code == 200
        assert http.get("/v1/models?limit=1000").json()["data"][0]["id"] == "tiny"
        assert http.post("/api/event_logging/batch", json={}).status_code == 404
        title = post(tools=[], max_tokens=512, stream=False, thinking={"type": "disabled"})
        assert title.json()["stop_reason"] == "end_turn"
        counts = [
            post("/v1/messages/count_tokens?beta=true", max_tokens=None, stream=None)
            for _ in range(6)
        ]
        assert len({count.json()["input_tokens"] for count in counts}) == 1
        server.client.endless = True
        with http.stream("POST", "/v1/messages?beta=true", json=body) as cancelled:
            next(cancelled.iter_lines())
        server.client.endless = False
        deadline = time.monotonic() + 30
        while server.client.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not server.client.running and len(server.client.aborted) == 1
        server.client.text = CALL
        called = message_of(events_of(post()))
        assert called["stop_reason"] == "tool_use"
        (call,) = called["content"]
        server.client.text = "It snows."
        outcome = {"type": "tool_result", "tool_use_id": call["id"], "content": "snow", **cached}
        history = [
            *body["messages"],
            {"role": "assistant", "content": called["content"]},
            {"role": "user", "content": [outcome]},
            {"role": "system", "content": [{"type": "text", "text": "Context is short."}]},
        ]
        answered = message_of(events_of(post(messages=history)))
        assert answered["content"] == [{"type": "text", "text": "It snows."}]
    first, last = (server.tokenizer.decode(server.client.requests[i][1]) for i in (0, -1))
    assert "cch=" not in first and "You are an agent.\nUse tools." in first
    assert last.index("snow") < last.index("Context is short.")
