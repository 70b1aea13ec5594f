"""Earlier answers, as clients send them again: refusals, reasoning, and answers that are empty."""

import pytest

ASKED = {"role": "user", "content": "Hi"}
NO = "I must not."


def part(text=NO):
    return {"type": "refusal", "refusal": text}


def expected(server, text):
    return server.tokenizer.encode_chat([ASKED, {"role": "assistant", "content": text}, ASKED])


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"content": [part()]}, NO),
        ({"content": [{"type": "text", "text": "Well."}, part()]}, f"Well.\n{NO}"),
        ({"content": None, "refusal": NO}, NO),
        ({"refusal": NO}, NO),
        ({"content": "Well.", "refusal": None}, "Well."),
    ],
)
def test_chat_refusal_is_read_as_text(server, answer, text):
    reply = server.chat(messages=[ASKED, {"role": "assistant", **answer}, ASKED])
    assert reply.status_code == 200, reply.text
    assert server.client.requests[0][1] == expected(server, text)
    assert "x-ignored-fields" not in reply.headers


@pytest.mark.parametrize("beside", [[], [{"type": "output_text", "text": "Well."}]])
def test_response_refusal_is_read_as_text(server, beside):
    answer = {"type": "message", "id": "msg-1", "status": "completed", "role": "assistant"}
    items = [ASKED, answer | {"content": [*beside, part()]}, ASKED]
    reply = server.post("/v1/responses", {"input": items})
    assert reply.status_code == 200, reply.text
    assert server.client.requests[0][1] == expected(
        server, "\n".join(["Well."] * len(beside) + [NO])
    )


def test_refusal_creates_no_control_tokens(server):
    (token,) = server.tokenizer.encode("<|im_end|>", False)
    messages = [{"role": "assistant", "content": [part("<|im_end|>")]}, ASKED]
    assert server.chat(messages=messages).status_code == 200
    assert server.client.requests[0][1].count(token) == len(messages)


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user", "content": [part()]}, ""),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, ".content.0"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": 1}]}, ".content.0"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}, ".content.0"),
    ],
)
def test_invalid_refusals_are_rejected(server, error, message, where):
    found = error(server.chat(messages=[message]), 400)
    assert found["param"] == f"messages.0{where}" and "refusal" in found["message"]
    found = error(server.post("/v1/responses", {"input": [message]}), 400)
    assert found["param"] == f"input.0{where}" and "refusal" in found["message"]


def test_tool_output_refusal_is_rejected(server, error):
    output = {"type": "function_call_output", "call_id": "c", "output": [part()]}
    assert error(server.post("/v1/responses", {"input": [output]}), 400)["param"] == "input.0"


def test_answers_and_results_may_be_empty(server):
    """An answer that was cut within its reasoning, or was empty; a tool that said nothing."""
    for message in (
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "c", "content": None},
    ):
        reply = server.chat(messages=[ASKED, message, ASKED])
        assert reply.status_code == 200, reply.text
        blank = {"role": message["role"], "content": ""}
        assert server.client.requests[-1][1] == server.tokenizer.encode_chat([ASKED, blank, ASKED])


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "reasoning", "text": "Hm."},
    ],
)
def test_thinking_parts_are_reasoning(server, monkeypatch, thought):
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    monkeypatch.setattr(server.tokenizer._tokenizer, "chat_template", template)
    answer = [thought, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes."}]
    messages = [ASKED, {"role": "assistant", "content": answer}]
    reply = server.chat(messages=messages)
    assert reply.status_code == 200, reply.text
    assert server.tokenizer.decode(server.client.requests[0][1]) == "[|Hi][Hm.|Yes.]"
    message = {"role": "assistant", "content": answer, "reasoning": "Told."}
    server.chat(messages=[ASKED, message])
    assert server.tokenizer.decode(server.client.requests[1][1]) == "[|Hi][Told.|Yes.]"


def test_invalid_thinking_parts_are_rejected(server, error):
    for part in (
        {"type": "thinking"},
        {"type": "thinking", "thinking": [1]},
        {"type": "reasoning"},
    ):
        found = error(server.chat(messages=[{"role": "assistant", "content": [part]}]), 400)
        assert found["param"] == "messages.0.content.0" and part["type"] in found["message"]


def test_hints_for_other_servers_are_reported_as_ignored(server):
    hint = {"type": "content", "content": "Hello"}
    reply = server.chat(verbosity="low", prediction=hint)
    assert reply.headers["x-ignored-fields"] == "verbosity, prediction"
    reply = server.post("/v1/responses", {"input": "Hi", "text": {"verbosity": "low"}})
    assert reply.headers["x-ignored-fields"] == "text.verbosity"
