"""How hard to think: `reasoning_effort` and the switches, where the chat template reads them."""

import pytest

from qserve.server.requests.protocol import Effort

MESSAGE = "{{ messages[0].content }}"
EFFORT = "[{{ reasoning_effort }}]"  # gpt-oss
SWITCH = "[{{ enable_thinking }}]"  # Qwen3, GLM-4.5
THINKING = "[{{ thinking }}]"  # Granite


@pytest.fixture
def templated(server, monkeypatch):
    """templated(template) -> the server, whose template that is."""

    def make(template):
        monkeypatch.setattr(server.tokenizer._tokenizer, "chat_template", template + MESSAGE)
        server.tokenizer.__dict__.pop("template_settings", None)
        return server

    yield make
    server.tokenizer.__dict__.pop("template_settings", None)


def ask(server, route, effort, **fields):
    if route == "chat":
        reply = server.chat(reasoning_effort=effort, **fields)
    else:
        fields |= {} if effort is None else {"reasoning": {"effort": effort}}
        reply = server.post("/v1/responses", {"input": "Hi", **fields})
    assert reply.status_code == 200, reply.text
    text = server.tokenizer.decode(server.client.requests[-1][1], False)
    return text, reply.headers.get("x-ignored-fields", ""), reply.json()


@pytest.mark.parametrize("route", ["chat", "responses"])
@pytest.mark.parametrize(
    ("template", "effort", "kwargs", "text"),
    [
        (EFFORT, "high", {}, "[high]"),
        (EFFORT, "none", {}, "[none]"),
        (EFFORT, None, {}, "[]"),
        (EFFORT, "low", {"reasoning_effort": "low"}, "[low]"),
        (EFFORT, None, {"reasoning_effort": "huge"}, "[huge]"),
        (SWITCH, "minimal", {}, "[True]"),
        (SWITCH, "none", {}, "[False]"),
        (SWITCH, None, {}, "[]"),
        (THINKING, "none", {}, "[False]"),
        (EFFORT + SWITCH, "none", {}, "[none][False]"),
        (EFFORT + SWITCH, "low", {"enable_thinking": False}, "[low][False]"),
    ],
)
def test_template_receives_settings(templated, route, template, effort, kwargs, text):
    fields = {"chat_template_kwargs": kwargs} if kwargs else {}
    found, ignored, reply = ask(templated(template), route, effort, **fields)
    assert found == f"{text}Hi" and not ignored
    if route == "responses":
        assert reply["reasoning"] == {"effort": effort, "summary": None}


@pytest.mark.parametrize(
    ("route", "name"), [("chat", "reasoning_effort"), ("responses", "reasoning.effort")]
)
def test_unused_template_settings_are_reported(templated, route, name):
    kwargs = {"enable_thinking": False, "thinking": True}
    found, ignored, _ = ask(templated(""), route, "high", chat_template_kwargs=kwargs)
    assert found == "Hi"
    assert {*ignored.split(", ")} == {name, *(f"chat_template_kwargs.{each}" for each in kwargs)}
    # Nothing is left for it to say where the switch is set.
    kwargs = {"enable_thinking": False}
    found, ignored, _ = ask(templated(SWITCH), route, "high", chat_template_kwargs=kwargs)
    assert (found, ignored) == ("[False]Hi", name)


def test_unused_reasoning_fields_are_reported(templated):
    reasoning = {"effort": "low", "summary": "auto", "generate_summary": None}
    reply = templated(EFFORT).post("/v1/responses", {"input": "Hi", "reasoning": reasoning})
    assert reply.headers["x-ignored-fields"] == "reasoning.summary"


def test_invalid_reasoning_effort_is_refused(templated, error):
    server = templated(EFFORT)
    assert error(server.chat(reasoning_effort="huge"), 400)["param"] == "reasoning_effort"
    differ = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert error(server.chat(**differ), 400)["param"] == "reasoning_effort"
    for fields, param in (
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ):
        assert error(server.post("/v1/responses", {"input": "Hi", **fields}), 400)["param"] == param


def test_tokenize_uses_chat_template_settings(templated):
    server = templated(EFFORT)
    fields = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "high"}
    found = server.post("/tokenize", fields).json()["tokens"]
    assert found == server.tokenizer.encode("[high]Hi", False)


def test_reasoning_efforts_equal_openai():
    from typing import get_args

    from openai.types.shared import ReasoningEffort

    (values, _) = get_args(ReasoningEffort)
    assert {*get_args(Effort)} == {*get_args(values)}
