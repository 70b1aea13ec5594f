"""Tools over HTTP: what reaches the engine, what the reply has, what is a 400."""

import json

import jsonschema
import openai
import pytest
from transformers import AutoTokenizer

from qserve.config import ServerConfig
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from qserve.text.tokenizer import Tokenizer
from tests.qserve.output_parsing.written_calls import WRITE
from tests.qserve.server.conftest import Server

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name="get_weather", parameters=WEATHER, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def named(name):
    return {"type": "function", "function": {"name": name}}


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOLS = [tool(), tool("g", None)]


@pytest.fixture
def hermes(make_server):
    config = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    return make_server(ServerConfig(**config))


def calling(arguments, **fields):
    call = {"id": "call_1", "type": "function"}
    call |= {"function": {"name": "g", "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "tool_calls": [call], **fields}


def choice_of(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def joined(chunks):
    """The message that a client makes of a stream's chunks, and how it ended."""
    message, calls, ending = {}, {}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            ending = choice["finish_reason"] or ending
            for key, value in choice["delta"].items():
                if key != "tool_calls" and value is not None:
                    message[key] = message.get(key, "") + value
            for part in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"arguments": ""})
                function = part["function"]
                assert ("id" in part) == ("type" in part) == ("name" in function)
                call |= {k: part[k] for k in ("id", "type") if k in part}
                call |= {"name": function["name"]} if "name" in function else {}
                call["arguments"] += function["arguments"]
    return message, [calls[index] for index in sorted(calls)], ending


def test_a_call_that_the_model_chose(hermes):
    hermes.client.text = f"Let me look.\n{CALL}"
    choice = choice_of(hermes.chat(tools=TOOLS))
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert message["content"] == "Let me look." and choice["finish_reason"] == "tool_calls"
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert hermes.client.requests[0][2].structured_outputs is None


def test_text_alone_is_no_call(hermes):
    choice = choice_of(hermes.chat(tools=TOOLS))
    assert choice["message"]["content"] == hermes.client.text
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


def test_calls_are_streamed(hermes, chunks):
    hermes.client.text = f"Hm.{CALL}\n{CALL}"
    found = chunks(hermes.chat(tools=TOOLS, stream=True))
    message, calls, ending = joined(found)
    assert message == {"role": "assistant", "content": "Hm."} and ending == "tool_calls"
    assert [call["arguments"] for call in calls] == ['{"city": "Oslo"}'] * 2
    assert calls[0]["id"] != calls[1]["id"]
    parts = [c for c in found if c["choices"][0]["delta"].get("tool_calls")]
    assert len(parts) > 4  # arguments come as they are written


def test_one_call_if_they_must_not_be_parallel(hermes, chunks):
    hermes.client.text = CALL + CALL
    asked = {"tools": TOOLS, "parallel_tool_calls": False}
    assert len(choice_of(hermes.chat(**asked))["message"]["tool_calls"]) == 1
    assert len(joined(chunks(hermes.chat(**asked, stream=True)))[1]) == 1


def test_a_broken_call_is_content(hermes):
    hermes.client.text = '<tool_call>{"name": "g", "arguments": {"a": ?}}</tool_call>'
    choice = choice_of(hermes.chat(tools=TOOLS))
    assert choice["message"]["content"] == hermes.client.text
    assert choice["finish_reason"] == "stop"


def test_a_call_cut_by_the_limit_says_so(hermes):
    hermes.client.text = CALL
    count = len(hermes.tokenizer.encode(CALL[: CALL.index("Oslo")]))
    choice = choice_of(hermes.chat(tools=TOOLS, max_tokens=count))
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "'


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls(server, chunks, stream):
    """Without a parser: a grammar makes the text."""
    call = {"name": "get_weather", "parameters": {"city": "x", "days": 2}}
    server.client.text = json.dumps([call, {"name": "g", "parameters": {}}])
    reply = server.chat(tools=TOOLS, tool_choice="required", stream=stream)
    if stream:
        _, calls, ending = joined(chunks(reply))
        found = [(each["name"], each["arguments"]) for each in calls]
    else:
        choice = choice_of(reply)
        assert choice["message"]["content"] is None
        ending = choice["finish_reason"]
        functions = [each["function"] for each in choice["message"]["tool_calls"]]
        found = [(each["name"], each["arguments"]) for each in functions]
    assert found == [("get_weather", json.dumps(call["parameters"])), ("g", "{}")]
    assert ending == "tool_calls"
    schema = json.loads(server.client.requests[0][2].structured_outputs.json)
    jsonschema.validate([call], schema)
    for wrong in ([], [{"name": "f", "parameters": {}}], [call | {"parameters": {}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call(server, chunks, stream):
    server.client.text = '{"city": "Rome"}'
    reply = server.chat(tools=TOOLS, tool_choice=named("get_weather"), stream=stream)
    if stream:
        _, ((call),), ending = joined(chunks(reply))
    else:
        choice = choice_of(reply)
        call, ending = choice["message"]["tool_calls"][0]["function"], choice["finish_reason"]
    assert (call["name"], call["arguments"], ending) == (
        "get_weather",
        '{"city": "Rome"}',
        "tool_calls",
    )
    assert json.loads(server.client.requests[0][2].structured_outputs.json) == WEATHER


@pytest.mark.parametrize("choice", ["required", named("get_weather"), "auto"])
def test_a_client_sees_no_content_beside_calls(hermes, run_live, chunks, choice):
    """A chunk for each token, also where nothing is known yet; none of them has content."""
    hermes.client.text = CALL
    asked = {"tools": TOOLS, "tool_choice": choice}
    opening, *found = chunks(hermes.chat(**asked, stream=True, max_tokens=99))
    assert len(found) == len(hermes.tokenizer.encode(hermes.client.text)) + 1  # the end token
    assert all("content" not in each["choices"][0]["delta"] for each in found)
    # Where the model chooses, it may still say something.
    assert opening["choices"][0]["delta"]["content"] == ("" if choice == "auto" else None)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{run_live(hermes)}/v1", api_key="-")
    messages = [{"role": "user", "content": "Hi"}]
    asked |= {"model": hermes.app.state.service.model_name, "messages": messages}
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream if event.type != "chunk"]
        message = stream.get_final_completion().choices[0].message
    assert kinds.count("content.delta") == (choice == "auto")
    assert message.tool_calls[0].function.name == "get_weather"
    assert message.content == ("" if choice == "auto" else None)


def test_references_of_tools_stay_within_the_tool(server):
    def tree(leaf):
        node = {"properties": {"child": {"$ref": "#/$defs/n"}, "leaf": {"type": leaf}}}
        node |= {"type": "object", "additionalProperties": False}
        return {
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/n"}},
            "$defs": {"n": node},
        }

    tools = [tool("a", tree("string")), tool("b", tree("integer"))]
    assert server.chat(tools=tools, tool_choice="required").status_code == 200
    schema = json.loads(server.client.requests[0][2].structured_outputs.json)
    for name, leaf, is_right in (
        ("a", "x", True),
        ("a", 1, False),
        ("b", 1, True),
        ("b", "x", False),
    ):
        calls = [{"name": name, "parameters": {"root": {"child": {"leaf": leaf}}}}]
        assert jsonschema.Draft202012Validator(schema).is_valid(calls) == is_right


def test_allowed_tools(server):
    allowed = {"mode": "required", "tools": [named("g")]}
    reply = server.chat(
        tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    assert reply.status_code == 200
    schema = json.loads(server.client.requests[0][2].structured_outputs.json)
    jsonschema.validate([{"name": "g", "parameters": {}}], schema)
    assert not jsonschema.Draft202012Validator(schema).is_valid(
        [{"name": "get_weather", "parameters": {"city": "x"}}]
    )


def test_tools_without_effect_are_named(hermes, server):
    """The bundled model's template writes no tools. A schema must be one that can be compiled."""
    header = hermes.chat(tools=[tool(strict=True)]).headers["x-ignored-fields"]
    assert header == "tools"
    header = hermes.chat(tools=[tool("g", NOT_COMPILED, strict=True)]).headers["x-ignored-fields"]
    assert header == "tools, tools.function.strict"
    assert choice_of(server.chat(tools=TOOLS, tool_choice="none"))["message"].keys() == {
        *("role", "content", "refusal")
    }


@pytest.mark.parametrize("more", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_empty_list_of_tools_is_no_tools(server, hermes, more):
    for each in (server, hermes):
        plain = choice_of(each.chat(seed=1, max_tokens=8))
        assert choice_of(each.chat(tools=[], seed=1, max_tokens=8, **more)) == plain


NOT_COMPILED = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tool_choice"),  # no parser
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": named("f")}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": named("h")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool(), tool()]}, "tools.1.function.name"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters"),
        ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        (
            {"tools": [tool(parameters=NOT_COMPILED)], "tool_choice": "required"},
            "tools.0.function.parameters",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "structured_outputs": {"json_object": True},
            },
            "structured_outputs",
        ),
    ],
)
def test_what_is_refused(server, error, fields, param):
    assert error(server.chat(**fields), 400)["param"] == param


def test_the_conversation_after_a_call(server, error):
    call = {"id": "call_1", "type": "function"}
    function = {"name": "g", "arguments": '{"a": "<|im_end|>"}'}
    asked = {"role": "user", "content": "Hi"}
    calls = {"role": "assistant", "content": None, "tool_calls": [call | {"function": function}]}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "7"}
    reply = server.chat(messages=[asked, calls, answer])
    assert reply.status_code == 200 and "x-warnings" not in reply.headers
    misplaced = [asked | {"tool_calls": calls["tool_calls"]}]
    assert error(server.chat(messages=misplaced), 400)["param"] == "messages.0.tool_calls"


def written(name):
    return WRITE[name]([("get_weather", {"city": "Oslo"})])


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_every_parser(make_server, chunks, name):
    server = make_server(ServerConfig(enable_auto_tool_choice=True, tool_call_parser=name))
    server.client.text = written(name)
    choice = choice_of(server.chat(tools=TOOLS))
    (call,) = choice["message"]["tool_calls"]
    _, streamed, ending = joined(chunks(server.chat(tools=TOOLS, stream=True)))
    assert choice["message"]["content"] is None
    for function in (call["function"], *streamed):
        assert function["name"] == "get_weather"
        assert json.loads(function["arguments"]) == {"city": "Oslo"}
    assert ending == choice["finish_reason"] == "tool_calls" and len(streamed) == 1
    server.client.text = "Plain."
    assert choice_of(server.chat(tools=TOOLS))["message"]["content"] == "Plain."


@pytest.mark.parametrize("choice", ["required", named("get_weather")])
@pytest.mark.parametrize("name", ["qwen3_coder", "gpt_oss", "olmo3", "kimi_k2"])
def test_required_calls_are_in_the_format_of_the_model(make_server, name, choice):
    server = make_server(ServerConfig(tool_call_parser=name))
    server.client.text = written(name)
    found = choice_of(server.chat(tools=TOOLS, tool_choice=choice))
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert found["message"]["content"] is None
    form = server.client.requests[-1][2].structured_outputs
    assert form.only_calls and ("only_calls" not in form.calls)
    if name == "kimi_k2":
        assert call["id"] == "functions.get_weather:0"


def test_ids_of_kimi_count_the_calls_of_the_conversation(make_server):
    """Its template shows them to the model again, which continues the count."""
    server = make_server(ServerConfig(tool_call_parser="kimi_k2"))
    server.client.text = written("kimi_k2")
    messages = [{"role": "user", "content": "Hi"}, calling({"city": "Rome"})]
    (call,) = choice_of(server.chat(messages=messages, tools=TOOLS))["message"]["tool_calls"]
    assert call["id"] == "functions.get_weather:1"


def test_strict_tools_are_held_where_the_model_chooses(make_server):
    server = make_server(ServerConfig(tool_call_parser="qwen3_coder"))
    server.client.text = "Hm."
    server.chat(tools=[tool(strict=True), tool("g", None)])
    form = server.client.requests[-1][2].structured_outputs
    assert form.only_calls and "days" in form.calls
    server.chat(tools=TOOLS)
    assert server.client.requests[-1][2].structured_outputs is None


GPT_OSS = (
    "{{ '<|start|>' }}{{ messages[-1]['content'] }}{# message.thinking to=functions. analysis"
    " <|channel|> #}<|start|>assistant"
)


def test_gpt_oss_is_read_by_default(make_server, monkeypatch, chunks, caplog):
    """Channels become reasoning, content and calls; the template says which parsers."""
    backend = make_server(ServerConfig()).tokenizer._tokenizer
    monkeypatch.setattr(backend, "chat_template", GPT_OSS)
    with caplog.at_level("INFO"):
        server = make_server(ServerConfig())
    assert "--tool-call-parser: gpt_oss (from the model's chat template" in caplog.text
    assert "--reasoning-parser: gpt_oss (from the model's chat template" in caplog.text
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    server.client.text = f"{thought}{written('gpt_oss')}"
    message = choice_of(server.chat(tools=TOOLS))["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "Hm.")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    server.client.text = f"{thought}<|channel|>final<|message|>Yes."
    message = choice_of(server.chat())["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
    streamed, _, _ = joined(chunks(server.chat(stream=True)))
    assert (streamed["content"], streamed["reasoning_content"]) == ("Yes.", "Hm.")
    server.chat(response_format={"type": "json_object"})
    form = server.client.requests[-1][2].structured_outputs
    assert "analysis" in form.prefix and "final" in form.opening


def test_a_template_without_a_known_format(make_server, caplog):
    with caplog.at_level("INFO"):
        make_server(ServerConfig())
    assert "--tool-call-parser: none (the chat template has no known format" in caplog.text


def test_a_call_that_breaks_in_a_stream(hermes, chunks):
    """Its name cannot be taken back; all that follows is content."""
    hermes.client.text = '<tool_call>{"name": "g", "arguments": {"a": ?}}</tool_call>'
    message, (call,), ending = joined(chunks(hermes.chat(tools=TOOLS, stream=True)))
    assert (call["name"], call["arguments"]) == ("g", '{"a": ')
    assert message["content"] == "?}}</tool_call>" and ending == "tool_calls"


def test_a_marker_that_is_a_special_token(docs_5m, tmp_path):
    """Answers leave special tokens out; here the parser has to see one."""
    saved = AutoTokenizer.from_pretrained(docs_5m)
    saved.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    saved.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.is_hidden("[TOOL_CALLS]") and not tokenizer.is_hidden("<tool_call>")
    config = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="mistral")
    server = Server(tokenizer, config)
    server.client.text = written("mistral")
    assert choice_of(server.chat(tools=TOOLS))["message"]["tool_calls"]
    assert not choice_of(server.chat())["message"]["content"].startswith("[TOOL_CALLS]")


def test_mistral_ids_fit_its_template(make_server):
    config = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="mistral")
    server = make_server(config)
    server.client.text = '[TOOL_CALLS] [{"name": "g", "arguments": {}}]'
    (call,) = choice_of(server.chat(tools=TOOLS))["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()


def test_openai_package(hermes, run_live):
    hermes.client.text = f"Hm.{CALL}"
    base = f"http://127.0.0.1:{run_live(hermes)}/v1"
    with openai.OpenAI(base_url=base, api_key="x", max_retries=0) as client:
        asked = {"model": hermes.app.state.service.model_name, "tools": TOOLS}
        messages = [{"role": "user", "content": "Weather?"}]
        whole = client.chat.completions.create(messages=messages, **asked).choices[0]
        (call,) = whole.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        with client.chat.completions.stream(messages=messages, **asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls" and streamed.message.content == "Hm."
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        # As clients do: the message goes back as it came.
        hermes.client.text = "Cold."
        answer = {"role": "tool", "tool_call_id": call.id, "content": "-3"}
        messages += [whole.message, answer]
        last = client.chat.completions.create(messages=messages, **asked).choices[0]
        assert last.message.content == "Cold." and last.finish_reason == "stop"


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_reasoning(make_server, chunks, name):
    server = make_server(ServerConfig(reasoning_parser=name))
    server.client.text = "<think>\nHm, well.\n</think>\n\nYes."
    message = choice_of(server.chat())["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm, well.")
    streamed, _, ending = joined(chunks(server.chat(stream=True)))
    assert ending == "stop"
    assert (streamed["content"], streamed["reasoning_content"]) == ("Yes.", "Hm, well.")


@pytest.mark.parametrize(
    ("name", "template", "has_reasoning"),
    [
        ("qwen3", "", False),
        ("qwen3", "{# strips all up to </think> #}", True),
        ("deepseek_r1", "", True),
    ],
)
def test_reasoning_before_a_form(make_server, monkeypatch, caplog, name, template, has_reasoning):
    """A model that does not reason must not be led to it where a form forbids all other words."""
    backend = make_server(ServerConfig()).tokenizer._tokenizer
    monkeypatch.setattr(backend, "chat_template", backend.chat_template + template)
    server = make_server(ServerConfig(reasoning_parser=name))
    server.chat(response_format={"type": "json_object"})
    prefix = server.client.requests[-1][2].structured_outputs.prefix
    assert ("</think>" in prefix) == has_reasoning and bool(prefix) == has_reasoning
    warned = "chat template lacks <think>" in caplog.text
    assert warned == (not has_reasoning)


def test_a_call_in_reasoning_is_none(make_server):
    config = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    server = make_server(ServerConfig(**config, reasoning_parser="qwen3"))
    server.client.text = f"<think>{CALL}</think>{CALL}"
    message = choice_of(server.chat(tools=TOOLS))["message"]
    assert len(message["tool_calls"]) == 1 and message["reasoning_content"] == CALL
