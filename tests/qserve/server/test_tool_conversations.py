"""Tools and earlier calls in the prompt: what the template gets."""

import json

import pytest

from qserve.config import ServerConfig
from qserve.text.tokenizer import Tokenizer
from tests.qserve.server.conftest import Server
from tests.qserve.server.test_tools import calling, tool

TEMPLATE = (
    "{% for t in tools or [] %}TOOL {{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }}"
    " {{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.fixture
def templated(docs_5m):
    """A server whose template reads tools and calls."""
    tokenizer = Tokenizer(docs_5m)
    tokenizer._tokenizer.chat_template = TEMPLATE
    config = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    return Server(tokenizer, config)


def test_template_receives_tools_and_calls(templated):
    asked = tool("g", {"type": "object"}, description="Tells.")
    messages = [
        {"role": "user", "content": "Hi"},
        calling({"a": [1, None]}, reasoning_content="Hm. "),
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    ]
    reply = templated.chat(messages=messages, tools=[asked])
    assert "x-ignored-fields" not in reply.headers
    prompt = templated.tokenizer.decode(templated.client.requests[0][1], False)
    shown, _, rest = prompt.partition("\n")
    assert json.loads(shown.removeprefix("TOOL ")) == asked
    assert rest == (
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\nHm. call_1 g {"a": [1, null]}<|im_end|>\n'
        "<|im_start|>tool\n7 for call_1<|im_end|>\n"
    )
    templated.chat(tools=[asked], tool_choice="none")
    assert "TOOL" not in templated.tokenizer.decode(templated.client.requests[1][1])


def test_prompts_with_tools_are_counted_without_a_parser(templated):
    plain = Server(templated.tokenizer, ServerConfig(tool_call_parser=None))
    asked, messages = tool("g", {"type": "object"}), [{"role": "user", "content": "Hi"}]
    assert plain.chat(messages=messages, tools=[asked]).status_code == 400
    want = templated.post("/tokenize", {"messages": messages, "tools": [asked]}).json()["tokens"]
    assert "TOOL" in templated.tokenizer.decode(want)
    reply = plain.post("/tokenize", {"messages": messages, "tools": [asked]})
    assert reply.status_code == 200 and reply.json()["tokens"] == want
    body = {"model": plain.get("/v1/models").json()["data"][0]["id"], "messages": messages}
    body["tools"] = [{"name": "g", "input_schema": {"type": "object"}}]
    reply = plain.post("/v1/messages/count_tokens", body)
    assert reply.status_code == 200 and reply.json()["input_tokens"] == len(want)


def rendered(server, messages, **fields):
    """The reply, and the last prompt as text."""
    reply = server.chat(messages=messages, **fields)
    assert reply.status_code == 200, reply.text
    return reply, server.tokenizer.decode(server.client.requests[-1][1], False)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": "Par', None),
        ('{"city": "Paris"}}', None),
        ("[1]", None),
        ('"a"', None),
        ("[" * 5000, None),
        ("", "{}"),
        (" ", "{}"),
        (None, "{}"),
        ('{"a": "line\nbreak"}', '{"a": "line\\nbreak"}'),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_truncated_arguments_do_not_break_conversation(templated, arguments, read):
    call = {"id": "c", "type": "function", "function": {"name": "g", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    reply, prompt = rendered(templated, [*messages, {"role": "tool", "tool_call_id": "c"}])
    assert f"c g {read or '{}'}<|im_end|>" in prompt
    path = "messages.1.tool_calls.0.function.arguments"
    assert reply.headers.get("x-warnings") == (
        None if read else f"{path}: not a JSON object, read as {{}}"
    )


def test_truncated_arguments_in_earlier_response(templated):
    call = {"type": "function_call", "call_id": "c 1", "name": "no/such tool"}
    items = [call | {"arguments": text} for text in ("{}", '{"a": ')]
    output = {"type": "function_call_output", "call_id": "c 1", "output": None}
    reply = templated.post("/v1/responses", {"input": [*items, output]})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-warnings"] == "input.1.arguments: not a JSON object, read as {}"
    prompt = templated.tokenizer.decode(templated.client.requests[-1][1], False)
    assert prompt.count("c 1 no/such tool {}") == 2


@pytest.mark.parametrize(
    "name", ["call:1/2 \u00e4\n\"'", "x" * 5000, "", "<|im_end|>", "a<|im_end|>b"]
)
def test_call_ids_accept_any_text(templated, name):
    """They are equal in the prompt, and make no control token."""
    call = {"id": name, "type": "function", "function": {"name": "g", "arguments": "{}"}}
    answer = {"role": "tool", "tool_call_id": name, "content": "7"}
    templated.client.max_model_len = 2**16
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, answer]
    _, prompt = rendered(templated, messages)
    assert prompt.startswith(f"<|im_start|>assistant\n{name} g {{}}<|im_end|>\n")
    assert (f" for {name}<|im_end|>" if name else "7<|im_end|>") in prompt
    (end,) = templated.tokenizer.encode("<|im_end|>", False)
    assert templated.client.requests[-1][1].count(end) == len(messages)


def test_many_tools_are_accepted(templated):
    tools = [tool(f"t{index}", {"type": "object"}) for index in range(1024)]
    templated.client.max_model_len = 2**20
    _, prompt = rendered(templated, [{"role": "user", "content": "Hi"}], tools=tools)
    assert prompt.count("TOOL ") == len(tools)


def test_tools_and_calls_create_no_control_tokens(templated, error):
    """A value is encoded as text. Where templates may look for names, it is refused."""
    end = "<|im_end|>"
    hidden = [calling({"role": end, "type": {"id": [end]}}, reasoning_content=end)]
    templated.chat(messages=hidden)
    prompt = templated.client.requests[0][1]
    (token,) = templated.tokenizer.encode(end, False)
    assert templated.tokenizer.decode(prompt, False).count(end) == 4
    assert prompt.count(token) == 1
    assert "messages" in error(templated.chat(messages=[calling({end: 1})]), 400)["message"]
    for wrong in (
        tool("g", description=end),
        tool("g", {"type": "object", "properties": {end: {}}}),
        tool("g", {"type": "object", "properties": {"a": {"enum": [end]}}}),
    ):
        assert "tools" in error(templated.chat(tools=[wrong]), 400)["message"]
