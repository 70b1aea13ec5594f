"""Routes other than completions and chats: tokens, states, responses, the server's own text."""

import json
import re

import pytest

from qserve.config import ServerConfig
from qserve.server.app import OPERATOR_TOPICS, TOPICS
from qserve.server.page.openapi import document
from qserve.server.page.openapi_routes import ROUTES
from qserve.server.page.routes import INLINE

TEXT = "Hello there, general reader."
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("text", ["plain text", "日本 \U0001f600 e\u0301", "a\x00\n\t\u2028", ""])
def test_tokenize_and_detokenize_round_trip(server, text):
    found = server.post("/tokenize", {"prompt": text}).json()
    assert found["tokens"] == server.tokenizer.encode(text) and found["token_strs"] is None
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 256)
    back = server.post("/detokenize", {"tokens": found["tokens"]}).json()
    assert back == {"prompt": text}


def test_tokenized_chat_equals_usage(server):
    found = server.post("/tokenize", {"messages": MESSAGES, "return_token_strs": True}).json()
    assert found["count"] == server.chat().json()["usage"]["prompt_tokens"]
    assert found["token_strs"][0] == "<|im_start|>" and len(found["token_strs"]) == found["count"]
    open_end = server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert open_end.json()["count"] < found["count"]


def test_text_beyond_the_context_is_counted(server):
    assert server.post("/tokenize", {"prompt": "word " * 5000}).json()["count"] > 256
    long = [{"role": "user", "content": "word " * 5000}]
    assert server.post("/tokenize", {"messages": long}).json()["count"] > 256


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, "messages.0.role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [8192]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"] * 1000}, "tokens.0"),
    ],
)
def test_invalid_tokenize_requests_are_refused(server, error, path, body, param):
    assert error(server.post(path, body), 400)["param"] == param


def test_model_of_a_token_request_is_checked(server, error):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert error(server.post(path, body | {"model": "other"}), 404)["param"] == "model"
        assert server.post(path, body | {"model": "tiny"}).status_code == 200


def test_version_load_and_probes(server):
    from qserve import __version__

    assert server.get("/version").json() == {"version": __version__}
    assert server.get("/load").json() == {"server_load": 0}
    for path in ("/ping", "/ready", "/health"):
        assert server.get(path).status_code == 200
    assert server.request("POST", "/ping").status_code == 200
    server.client.is_alive = False
    for path in ("/ping", "/ready", "/health"):
        assert server.get(path).status_code == 503


def test_load_counts_running_outputs(server):
    with server.app.state.service.admission.admit("c", 3, 10):
        assert server.get("/load").json() == {"server_load": 3}


def test_stopping_server_is_healthy_but_not_ready(server, error):
    object.__setattr__(server.app.state.service, "is_stopping", lambda: True)
    assert "stopping" in error(server.get("/ready"), 503)["message"]
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("path", sorted(path for path, method in ROUTES if method == "get"))
def test_head_equals_get_without_body(server, path):
    path = path.replace("{name}", "tiny")
    expected = 404 if "{id}" in path else 200  # without --response-store
    found = server.request("HEAD", path).status_code, server.get(path).status_code
    assert found == (expected, expected)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_routes_for_other_model_types_are_refused_with_reason(server, error, path, body):
    body = error(server.post(path, {**body, "model": "tiny"}), 404)
    assert "modules.json" in body["message"]


def test_several_names_of_one_model(make_server, error):
    server = make_server(ServerConfig(served_model_name=["tiny", "gpt-x"]))
    listed = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["tiny", "gpt-x"]
    for name in ("tiny", "gpt-x"):
        assert server.get(f"/v1/models/{name}").json()["id"] == name
        assert server.complete(model=name).json()["model"] == "tiny"
    body = error(server.complete(model="other"), 404)
    assert "'tiny', 'gpt-x'" in body["message"]


def responses(server, **fields):
    return server.post("/v1/responses", {"input": "Hi", **fields})


def test_response_object(server):
    reply = responses(server, instructions="Be kind.", metadata={"a": "b"}).json()
    assert reply["id"].startswith("resp_") and reply["object"] == "response"
    assert (reply["status"], reply["error"], reply["store"]) == ("completed", None, False)
    assert (reply["instructions"], reply["metadata"]) == ("Be kind.", {"a": "b"})
    (item,) = reply["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    part = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    prompt = server.client.requests[0][1]
    messages = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    assert prompt == server.tokenizer.encode_chat(messages)
    usage = reply["usage"]
    assert usage["input_tokens"] == len(prompt)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_response_that_is_too_long_is_incomplete(server):
    reply = responses(server, max_output_tokens=2).json()
    assert reply["status"] == "incomplete" and reply["max_output_tokens"] == 2
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["usage"]["output_tokens"] == 2


def test_items_of_a_conversation_are_a_chat(server):
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    items = [
        {"role": "user", "content": parts, "name": "Ada"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"role": "user", "content": "last"},
    ]
    assert responses(server, input=items, temperature=0.5, seed=3).status_code == 200
    _, prompt, params = server.client.requests[0]
    messages = [("user", "one\ntwo"), ("assistant", "x"), ("user", "last")]
    expected = [{"role": role, "content": text} for role, text in messages]
    assert prompt == server.tokenizer.encode_chat(expected)
    assert (params.temperature, params.seed) == (0.5, 3)


def test_events_of_a_response(server):
    reply = responses(server, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    ending = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = ["output_text.delta"] * (len(server.tokenizer.encode(TEXT)) + 1)
    assert kinds == [*opening, *deltas, *ending]
    assert "".join(e["delta"] for e in events if "delta" in e) == events[-4]["text"] == TEXT
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    assert events[0]["response"]["status"] == "in_progress"
    item_ids = {e["item_id"] for e in events if "item_id" in e}
    assert item_ids == {events[-1]["response"]["output"][0]["id"]}


def test_failing_stream_of_a_response_ends_with_an_error(server):
    server.client.fails_at = 2
    text = responses(server, stream=True).text
    last = text.rstrip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == 500


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"type": "function_call_output", "role": "user", "content": ""}]}, "input.0"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 257}, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"temperature": 9}, "temperature"),
        ({"guided_json": {}}, "guided_json"),
        ({"bad_words": [""]}, "bad_words"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"n": 2}, "n"),
    ],
)
def test_invalid_responses_are_refused(server, error, fields, param):
    assert error(responses(server, **fields), 400)["param"].startswith(param)
    assert not server.client.requests


def test_response_fields_without_effect_are_reported(server):
    items = [{"role": "user", "content": "a", "id": "msg-1", "status": "completed", "odd": 1}]
    fields = {"store": True, "parallel_tool_calls": True, "user": "u", "nobody": 1}
    reply = responses(server, input=items, **fields)
    assert reply.headers["x-ignored-fields"].split(", ") == [
        *("user", "store", "parallel_tool_calls", "nobody", "input.odd")
    ]
    assert "x-ignored-fields" not in responses(server, store=False, tools=[], top_k=3).headers


def test_openapi_lists_exactly_the_routes(server):
    known = {
        (route.path.replace(":path", ""), method.lower())
        for topic in (*TOPICS, *OPERATOR_TOPICS)
        for route in topic.routes
        for method in route.methods - {"HEAD"}
    }
    pages = {("/openapi.json", "get"), ("/docs", "get"), ("/", "get")}
    assert {*ROUTES} == known - pages
    assert server.get("/openapi.json").json() == document(256, 8192)


def test_openapi_is_complete():
    text = json.dumps(document(256, 8192))
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names == set(document(256, 8192)["components"]["schemas"])
    assert "422" not in text and "HTTPValidationError" not in text
    fields = document(256, 8192)["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert fields["guided_json"] == {"enum": [None]}
    assert fields["suffix"] == {"enum": ["", None]}
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == 256


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_no_external_resources(server, path):
    reply = server.get(path)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert policy.count("sha256-") == len(INLINE.findall(reply.text)) >= 2
    assert not re.findall(r"(?:src|href)=\"?(?:https?:)?//", reply.text)
    assert " on" + "click=" not in reply.text and " style=" not in reply.text


def test_openapi_requires_nonempty_salt():
    """Clients that make bodies of the schema would be refused."""
    models = document(256, 8192)["components"]["schemas"].values()
    salts = [each["properties"]["cache_salt"] for each in models if "cache_salt" in str(each)]
    assert len(salts) > 4
    assert all({"type": "string", "minLength": 1} in salt["anyOf"] for salt in salts)
