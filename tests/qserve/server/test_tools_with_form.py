"""Tools together with a response_format: the model's choice, or a call that has to be."""

import json

import pytest

from qserve.config import ServerConfig
from qserve.structured.grammar import grammar_text
from tests.qserve.server.test_tools import (
    CALL,
    NOT_COMPILED,
    TOOLS,
    WEATHER,
    choice_of,
    joined,
    named,
    tool,
    written,
)

ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
CONTENT = '{"answer": "Rain."}'


@pytest.fixture
def asking(make_server):
    """A server with a parser, and the form of the last output that its engine got."""

    def make(parser="hermes", **config):
        server = make_server(
            ServerConfig(enable_auto_tool_choice=True, tool_call_parser=parser, **config)
        )

        def form():
            return server.client.requests[-1][2].structured_outputs

        return server, form

    return make


@pytest.fixture
def takes(docs_5m):
    """A judge that says if a text is whole under a form's grammar."""
    from qserve.structured.backend import library

    backend = library().LLTokenizer((docs_5m / "tokenizer.json").read_text())

    def judge(form, text):
        matcher = library().LLMatcher(backend, grammar_text(form), log_level=0)
        tokens = backend.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return judge


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "qwen3_coder", "olmo3"])
@pytest.mark.parametrize("stream", [False, True])
def test_model_chooses_call_or_response_format(asking, takes, chunks, parser, stream):
    server, form = asking(parser)
    asked = {"tools": TOOLS, "response_format": FORMAT, "stream": stream}
    server.client.text = written(parser)
    reply = server.chat(**asked)
    if stream:
        message, (call,), ending = joined(chunks(reply))
        assert not message.get("content")
    else:
        choice = choice_of(reply)
        ending, call = choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Oslo"})
    assert ending == "tool_calls"
    assert takes(form(), written(parser)) and takes(form(), CONTENT)
    assert not takes(form(), "It rains.") and not takes(form(), "{}")
    server.client.text = CONTENT
    reply = server.chat(**asked)
    if stream:
        message, calls, ending = joined(chunks(reply))
    else:
        choice = choice_of(reply)
        message, calls, ending = choice["message"], (), choice["finish_reason"]
    assert (message["content"], list(calls), ending) == (CONTENT, [], "stop")


def test_choice_is_equal_after_tool_results(asking, takes):
    server, form = asking()
    call = {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    server.client.text = CONTENT
    choice = choice_of(server.chat(messages=messages, tools=TOOLS, response_format=FORMAT))
    assert choice["message"]["content"] == CONTENT
    assert takes(form(), CONTENT) and takes(form(), CALL)


def test_one_call_if_they_must_not_be_parallel(asking, takes):
    server, form = asking()
    server.chat(tools=TOOLS, response_format=FORMAT, parallel_tool_calls=False)
    assert takes(form(), CALL) and not takes(form(), f"{CALL}\n{CALL}")
    server.chat(tools=TOOLS, response_format=FORMAT)
    assert takes(form(), f"{CALL}\n{CALL}")


def test_reasoning_precedes_call_or_response_format(asking, takes):
    server, form = asking(reasoning_parser="deepseek_r1")
    server.client.text = f"Hm.</think>\n{CONTENT}"
    choice = choice_of(server.chat(tools=TOOLS, response_format=FORMAT))
    assert choice["message"]["content"] == CONTENT
    assert choice["message"]["reasoning_content"] == "Hm."
    for text in (CALL, CONTENT):
        assert takes(form(), f"Hm.</think>\n{text}") and not takes(form(), text)


def test_vllm_field_and_responses_keep_the_choice(asking, takes):
    server, form = asking()
    server.chat(tools=TOOLS, structured_outputs={"choice": ["yes", "no"]})
    assert takes(form(), "yes") and takes(form(), CALL) and not takes(form(), "maybe")
    text = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}}
    tools = [{"type": "function"} | each["function"] for each in TOOLS]
    server.client.text = CALL
    reply = server.post("/v1/responses", {"input": "Hi", "tools": tools, "text": text})
    assert [item["type"] for item in reply.json()["output"]] == ["function_call"]
    assert takes(form(), CONTENT) and takes(form(), CALL)
    server.client.text = CONTENT
    reply = server.post("/v1/responses", {"input": "Hi", "tools": tools, "text": text})
    assert reply.json()["output"][0]["content"][0]["text"] == CONTENT


@pytest.mark.parametrize("choice", ["required", named("get_weather")])
def test_required_call_overrides_response_format(server, takes, choice):
    arguments = {"city": "Oslo"}
    is_named = choice != "required"
    text = json.dumps(arguments if is_named else [call_of(arguments)])
    server.client.text = text
    reply = server.chat(tools=TOOLS, tool_choice=choice, response_format=FORMAT)
    (call,) = choice_of(reply)["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == arguments
    assert "response_format" in reply.headers["x-ignored-fields"].split(", ")
    form = server.client.requests[0][2].structured_outputs
    assert takes(form, text) and not takes(form, CONTENT)


def call_of(arguments):
    return {"name": "get_weather", "parameters": arguments}


def test_unenforceable_tool_schemas(asking, takes, error):
    """The model may call the tool with any object, unless the tool is strict."""
    server, form = asking()
    loose = tool("g", NOT_COMPILED)
    assert server.chat(tools=[tool(), loose], response_format=FORMAT).status_code == 200
    call = CALL.replace("get_weather", "g")
    assert takes(form(), call.replace('"Oslo"', "[1]"))
    assert not takes(form(), CALL.replace('"Oslo"', "[1]"))
    strict = tool("g", NOT_COMPILED, strict=True)
    found = error(server.chat(tools=[tool(), strict], response_format=FORMAT), 400)
    assert found["param"] == "tools.1.function.parameters"


def test_strict_is_reported_as_ignored_only_if_ignored(asking):
    server, _ = asking()
    strict = [tool(strict=True)]
    held = server.chat(tools=strict, response_format=FORMAT).headers["x-ignored-fields"]
    assert held == "tools"
    plain = server.chat(tools=strict, response_format={"type": "text"})
    assert plain.headers["x-ignored-fields"] == "tools"


def test_no_response_format_means_no_constraint(asking):
    server, form = asking()
    server.chat(tools=TOOLS)
    assert form() is None
    server.chat(tools=TOOLS, tool_choice="none", response_format=FORMAT)
    assert json.loads(form().json) == ANSWER and not form().calls
    assert json.loads(form().json) != WEATHER
