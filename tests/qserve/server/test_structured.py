"""response_format and structured_outputs over HTTP: what reaches the engine, what is a 400."""

import functools

import pytest

from qserve.config import ServerConfig
from qserve.structured.params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NOWHERE = {"$ref": "#/nowhere"}
DEEP = functools.reduce(lambda items, _: {"type": "array", "items": items}, range(70), {})


def form_of(server):
    return server.client.requests[0][2].structured_outputs


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_json_schema_response_format(server, route):
    named = {"name": "answer", "strict": True, "schema": SCHEMA}
    asked = {"type": "json_schema", "json_schema": named}
    assert getattr(server, route)(response_format=asked).status_code == 200
    assert form_of(server) == StructuredOutputsParams(json=SCHEMA)


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_object", "schema": None}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_object", "schema": SCHEMA}, StructuredOutputsParams(json=SCHEMA)),
    ],
)
def test_other_response_formats(server, asked, form):
    assert server.chat(response_format=asked).status_code == 200
    assert form_of(server) == form


NAMES = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
LOOSE = {"type": "object", "properties": {"a\u00e4;": NAMES}}
PLACE = "#/properties/a??"


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("route", ["complete", "chat", "responses", "tools"])
def test_unenforced_keyword_is_warned_or_refused(make_server, error, is_strict, route):
    server = make_server(ServerConfig(structured_output_strict=is_strict))
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOSE}}
    if route == "responses":
        text = {"format": {"type": "json_schema", "name": "n", "schema": LOOSE}}
        reply, param = server.post("/v1/responses", {"input": "Hi", "text": text}), "text.format"
    elif route == "tools":
        tool = {"type": "function", "function": {"name": "f", "parameters": LOOSE}}
        reply, param = server.chat(tools=[tool], tool_choice="required"), "tools"
    else:
        reply, param = getattr(server, route)(response_format=form), "response_format"
    if is_strict:
        found = error(reply, 400)
        assert "uniqueItems at #" in found["message"] and "not enforced" in found["message"]
        assert found["param"] == param and found["message"].startswith(f"{param}: ")
        return
    assert reply.status_code == 200, reply.text
    where = PLACE if route != "tools" else PLACE.replace("#", "#/$defs/0")
    reason = f"uniqueItems at {where} is not enforced (its items are not a few known values)"
    assert reply.headers["x-warnings"] == f"{param}: {reason}"


def test_enforced_schema_gives_no_warning(make_server):
    server = make_server(ServerConfig(structured_output_strict=True))
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    reply = server.chat(response_format=named)
    assert reply.status_code == 200 and "x-warnings" not in reply.headers


def test_vllm_structured_outputs_field(server):
    asked = {"regex": "a+", "choice": None}
    assert server.complete(structured_outputs=asked, n=2).status_code == 200
    forms = {request[2].structured_outputs for request in server.client.requests}
    assert forms == {StructuredOutputsParams(regex="a+")}


def test_responses_text_format(server):
    text = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    reply = server.post("/v1/responses", {"input": "Hi", "text": text})
    assert reply.status_code == 200 and reply.json()["text"] == text
    assert form_of(server) == StructuredOutputsParams(json=SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"$ref": "#/x"}},
                }
            },
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"nothing": 1}}, "structured_outputs.nothing"),
    ],
)
def test_invalid_schema_is_a_400(server, error, fields, param):
    assert error(server.chat(**fields), 400)["param"] == param
    assert not server.client.requests


def test_errors_of_responses_name_text_format(server, error):
    for schema, problem in ((NOWHERE, "cannot be used"), (DEEP, "expected at most 64 nested")):
        text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
        found = error(server.post("/v1/responses", {"input": "Hi", "text": text}), 400)
        assert found["message"].startswith(f"text.format: {problem}")
        assert found["param"] == "text.format"


def test_structural_tags(server, error):
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    want = StructuredOutputsParams(structural_tag=tag)
    assert server.chat(response_format={"type": "structural_tag", **tag}).status_code == 200
    assert server.chat(structured_outputs={"structural_tag": tag}).status_code == 200
    assert [each[2].structured_outputs for each in server.client.requests] == [want, want]
    wrong = {"type": "structural_tag", **tag, "triggers": ["<g"]}
    assert error(server.chat(response_format=wrong), 400)["param"] == "response_format"
