"""Tools on /v1/responses: the items of an answer, its events, and conversations with calls."""

import json

import openai
import pytest

from qserve.config import ServerConfig
from tests.qserve.server.test_tools import CALL, WEATHER

TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER, "description": "Look."}
ROUTE = "/v1/responses"
ASKED = [{"role": "user", "content": "Oslo?"}]


@pytest.fixture
def hermes(make_server):
    config = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    config["served_model_name"] = ["tiny"]
    return make_server(ServerConfig(**config))


def ask(server, **fields):
    return server.post("/v1/responses", {"input": ASKED, "tools": [TOOL], **fields})


def test_an_answer_and_two_calls(hermes):
    hermes.client.text = f"Let me look.\n{CALL}\n{CALL}"
    reply = ask(hermes).json()
    text, *calls = reply["output"]
    assert (text["type"], text["content"][0]["text"].strip()) == ("message", "Let me look.")
    for call in calls:
        assert (call["type"], call["name"], call["status"]) == (
            *("function_call", "get_weather", "completed"),
        )
        assert json.loads(call["arguments"]) == {"city": "Oslo"}
    assert len(calls) == 2 and len({each["id"] for each in reply["output"]}) == 3
    assert calls[0]["call_id"] != calls[1]["call_id"]
    assert reply["tools"][0]["name"] == "get_weather" and reply["tool_choice"] == "auto"


# The fields that the specification of Open Responses requires of a response, with their types.
NULL, NUMBER = type(None), (int, float)
REQUIRED = {
    **dict.fromkeys(("id", "object", "status", "model", "truncation", "service_tier"), str),
    **dict.fromkeys(("created_at", "top_logprobs"), int),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), (int, NULL)),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), NUMBER),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "instructions"), (str, NULL)),
    **dict.fromkeys(("previous_response_id",), (str, NULL)),
    **dict.fromkeys(("error", "incomplete_details", "usage", "reasoning"), (dict, NULL)),
    **dict.fromkeys(("output", "tools"), list),
    **dict.fromkeys(("text", "metadata"), dict),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), bool),
    "tool_choice": (str, dict),
}


def responses_of(reply):
    """The response objects of a stream's events, or the only one of a whole reply."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return [reply.json()]
    lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    return [event["response"] for event in events if "response" in event]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [None, 2])
def test_a_response_has_every_field_that_strict_clients_require(hermes, stream, limit):
    asked = {"presence_penalty": 0.5, "frequency_penalty": -0.25, "prompt_cache_key": "k"}
    asked |= {"safety_identifier": "s", "max_tool_calls": 3, "max_output_tokens": limit}
    reply = ask(hermes, stream=stream, **asked)
    for response in responses_of(reply):
        wrong = [name for name, kind in REQUIRED.items() if not isinstance(response[name], kind)]
        assert not wrong and {name: response[name] for name in asked} == asked
        is_complete = response["status"] == "completed"
        assert (response["completed_at"] is None) == (not is_complete)
        assert (
            response["completed_at"] is None or response["completed_at"] >= response["created_at"]
        )
        assert (response["service_tier"], response["top_logprobs"]) == ("default", 0)
        (tool,) = response["tools"]
        assert tool == TOOL | {"strict": None}
    ignored = reply.headers["x-ignored-fields"]
    assert ignored.startswith("max_tool_calls, prompt_cache_key, safety_identifier")


def test_tools_of_a_response_are_repeated_in_full(hermes):
    bare = {"type": "function", "name": "now", "defer_loading": False}
    tools = ask(hermes, tools=[bare]).json()["tools"]
    assert tools == [bare | {"description": None, "parameters": None, "strict": None}]


def test_a_client_goes_on_after_a_call(hermes, run_live):
    """openai's client: a stream whose calls it puts together, then their outputs."""
    hermes.client.text = f"Let me look.\n{CALL}"
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{run_live(hermes)}/v1", api_key="-")
    with client.responses.stream(model="tiny", input=ASKED, tools=[TOOL]) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "created" and kinds[-1] == "completed"
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 2
    assert kinds.index("output_text.done") < kinds.index("function_call_arguments.delta")
    call = final.output[1]
    assert json.loads(call.arguments) == {"city": "Oslo"}
    said = [*ASKED, *(item.model_dump() for item in final.output)]
    said.append({"type": "function_call_output", "call_id": call.call_id, "output": "5 degrees"})
    hermes.client.text = "It is cold."
    reply = client.responses.create(model="tiny", input=said, tools=[TOOL])
    assert reply.output_text == "It is cold."
    prompt = hermes.client.requests[-1][1]
    called = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    calls = [{"id": call.call_id, "type": "function", "function": called}]
    text = final.output[0].content[0].text
    messages = [
        *ASKED,
        {"role": "assistant", "content": text, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "5 degrees"},
    ]
    function = {key: TOOL[key] for key in ("name", "description", "parameters")}
    tools = [{"type": "function", "function": function}]
    assert prompt == hermes.tokenizer.encode_chat(messages, tools=tools)


def test_events_add_up_to_the_whole(hermes):
    hermes.client.text = f"Let me look.\n{CALL} Done."
    blocks = ask(hermes, stream=True).text.rstrip("\n").split("\n\n")
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    whole = ask(hermes).json()
    items = {}
    for event in events:
        if "delta" in event:
            index = event["output_index"]
            items[index] = items.get(index, "") + event["delta"]
    streamed = events[-1]["response"]["output"]
    texts = [each.get("arguments") or each["content"][0]["text"] for each in streamed]
    assert texts == [items[index] for index in range(len(items))]
    assert [each["type"] for each in streamed] == ["message", "function_call", "message"]
    calls = [
        [each for each in of if each["type"] != "message"] for of in (streamed, whole["output"])
    ]
    assert calls[0][0]["arguments"] == calls[1][0]["arguments"]


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'),
        ({"type": "function", "name": "get_weather"}, '{"city": "Oslo"}'),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{**TOOL}]},
            '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]',
        ),
    ],
)
def test_calls_that_have_to_be(server, choice, text):
    server.client.text = text
    reply = ask(server, tool_choice=choice).json()
    (call,) = reply["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Oslo"})
    assert server.client.requests[0][2].structured_outputs is not None
    assert reply["tool_choice"] == choice


def test_reasoning_is_an_item(make_server):
    server = make_server(ServerConfig(reasoning_parser="deepseek_r1"))
    server.client.text = "<think>Hm.</think>Yes."
    reasoning, text = server.post("/v1/responses", {"input": "Hi"}).json()["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["type"] == "reasoning" and text["content"][0]["text"] == "Yes."
    stream = server.post("/v1/responses", {"input": "Hi", "stream": True}).text
    assert stream.count("event: response.reasoning_text.done") == 1
    # What comes back of it is not said again.
    again = {"input": [*ASKED, reasoning, text, *ASKED]}
    assert server.post("/v1/responses", again).status_code == 200
    messages = [*ASKED, {"role": "assistant", "content": "Yes."}, *ASKED]
    assert server.client.requests[-1][1] == server.tokenizer.encode_chat(messages)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": None, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
        ({"input": [{"type": "web_search_call"}]}, "input.0"),
        *(({"input": [item]}, "input.0") for item in (1, None, [], "a", 0.5, {"type": 1})),
    ],
)
def test_what_is_refused(hermes, error, fields, param):
    assert error(ask(hermes, **fields), 400)["param"] == param


def test_item_of_a_tool_that_is_not_here_is_named(server, error):
    for kind in ("custom_tool_call", "web{search}call"):
        found = error(server.post("/v1/responses", {"input": [{"type": kind}]}), 400)
        assert found["message"].endswith(
            f"function_call_output or reasoning, found '{kind}' (use one of these types)"
        )


def test_what_tool_choice_is_like_is_said_in_this_routes_form(server, error):
    message = error(ask(server, tool_choice={"type": "function"}), 400)["message"]
    assert '{"type": "function", "name": ...}' in message
    choice = {"type": "function", "name": "f"}
    message = error(ask(server, tools=None, tool_choice=choice), 400)["message"]
    assert message.startswith("tool_choice: requires at least one tool")


def test_a_reference_says_how_clients_send_items(server, error):
    """Vercel's AI SDK sends an earlier answer like this unless it has store: false."""
    items = [*ASKED, {"type": "item_reference", "id": "msg_1"}, *ASKED]
    found = error(server.post("/v1/responses", {"input": items}), 400)
    assert found["param"] == "input.1" and "store: false" in found["message"]


def test_input_tokens_are_those_of_the_prompt(hermes, error):
    body = {"input": ASKED, "tools": [TOOL], "instructions": "Be brief.", "truncation": "auto"}
    counted = hermes.post("/v1/responses/input_tokens", body).json()
    assert not hermes.client.requests
    used = hermes.post("/v1/responses", body).json()["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}
    for wrong in ({"tool_choice": {"type": "function", "name": "x"}}, {"model": "other"}):
        refused = [hermes.post(path, body | wrong) for path in (ROUTE, f"{ROUTE}/input_tokens")]
        first, second = (error(reply, reply.status_code) for reply in refused)
        assert first == second


def test_input_tokens_beyond_the_context_are_counted(server):
    body = {"input": "word " * 500}
    assert server.post(f"{ROUTE}/input_tokens", body).json()["input_tokens"] > 256
    assert server.post(ROUTE, body).status_code == 400


def test_auto_needs_a_parser(server, error):
    assert "--tool-call-parser" in error(ask(server), 400)["message"]


def test_tools_of_openais_servers_are_skipped_next_to_functions(hermes, error):
    """Codex sends some in every request."""
    hosted = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [TOOL]}]
    hermes.client.text = CALL
    reply = ask(hermes, tools=[*hosted, TOOL])
    assert reply.json()["output"][0]["name"] == "get_weather"
    assert {"tools.0", "tools.1"} <= {*reply.headers["x-ignored-fields"].split(", ")}
    bad = TOOL | {"parameters": {"type": "object", "properties": {"a": {"$ref": "#/no"}}}}
    body = error(ask(hermes, tools=[*hosted, bad], tool_choice="required"), 400)
    assert body["param"] == "tools.2.parameters" and "tools.2.parameters" in body["message"]
    body = error(ask(hermes, tools=[hosted[0], {"type": "function"}]), 400)
    assert body["param"] == "tools.1.name"
