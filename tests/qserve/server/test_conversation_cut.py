"""`truncation: "auto"` of /v1/responses: a conversation loses its beginning until it fits."""

from types import SimpleNamespace

import pytest

from qserve.config import ServerConfig
from qserve.server.requests.chat import can_go, max_that_fit
from tests.qserve.server.test_response_tools import TOOL

LETTERS = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
CONTEXT = 256  # tokens of the scripted engine
LONG = "The first engine of the kind ran on coal and steam. " * 2  # 25 to 30 tokens


def roles(letters):
    return [LETTERS[letter] for letter in letters]


@pytest.mark.parametrize(
    ("letters", "groups"),
    [
        ("u", []),
        ("uau", [[0, 1]]),
        ("suaudau", [[1, 2], [3, 5]]),  # the system's stay, wherever they are
        ("uuu", [[0], [1]]),
        ("auau", [[0], [1, 2]]),  # an answer without its question is the first to go
        ("uattauattu", [[0, 1, 2, 3, 4], [5, 6, 7, 8]]),
        ("uatatt", [[1, 2]]),  # a call goes with its outputs; what came last stays
        ("uauatata", [[0, 1], [3, 4], [5, 6]]),
        ("aat", [[0]]),
        ("s", []),
        ("", []),
    ],
)
def test_related_messages_are_removed_together(letters, groups):
    assert can_go(roles(letters)) == groups


@pytest.mark.parametrize("num_users", [1, 2, 7, 60])
def test_only_necessary_messages_are_removed(num_users):
    messages = [SimpleNamespace(role=role, at=at) for at, role in enumerate(roles("ua" * 60))]
    messages = messages[: 2 * num_users - 1]
    for limit in range(1, len(messages) + 2, 3):
        asked = []

        def fits(kept, limit=limit, asked=asked):
            asked.append(len(kept))
            return len(kept) <= limit

        kept = max_that_fit(messages, fits)
        assert kept == messages[-len(kept) :] and kept[0].role == "user"
        assert len(kept) == max(1, min(len(messages), limit - (limit + 1) % 2))
        assert len(asked) <= 8


def conversation(num_turns):
    said = []
    for turn in range(num_turns):
        said.append({"role": "user", "content": f"Question {turn}. {LONG}"})
        said.append({"role": "assistant", "content": f"Answer {turn}. {LONG}"})
    return [*said, {"role": "user", "content": "And now?"}]


def ask(server, items, **fields):
    return server.post("/v1/responses", {"input": items, "truncation": "auto", **fields})


def test_oldest_messages_are_removed_and_rest_unchanged(server):
    said = conversation(12)
    fields = {"instructions": "Be brief.", "max_output_tokens": 40}
    reply = ask(server, said, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["truncation"] == "auto"
    _, prompt, params = server.client.requests[0]
    system = {"role": "system", "content": "Be brief."}
    lengths = {
        start: server.tokenizer.encode_chat([system, *said[start:]])
        for start in range(0, len(said), 2)
    }
    (start,) = (start for start, tokens in lengths.items() if tokens == prompt)
    assert 0 < start < len(said) - 1
    assert len(prompt) + 40 <= CONTEXT < len(lengths[start - 2]) + 40
    assert params.max_tokens == 40
    assert reply.json()["usage"]["input_tokens"] == len(prompt)


def test_truncation_leaves_space_for_output(server):
    for limit in (None, 20, 200):
        assert ask(server, conversation(12), max_output_tokens=limit).status_code == 200
    none, few, many = (request[1] for request in server.client.requests)
    assert len(none) >= len(few) > len(many)
    assert CONTEXT - 80 < len(none) < CONTEXT and len(many) + 200 <= CONTEXT


def test_fitting_conversation_is_unchanged(server):
    said = conversation(1)
    assert ask(server, said, max_output_tokens=10).status_code == 200
    assert server.client.requests[0][1] == server.tokenizer.encode_chat(said)


@pytest.mark.parametrize("truncation", [None, "disabled"])
def test_disabled_is_an_error_beyond_the_context(server, error, truncation):
    body = {"input": conversation(12), "truncation": truncation}
    found = error(server.post("/v1/responses", body), 400)
    assert "maximum context length is 256" in found["message"]
    short = server.post("/v1/responses", {"input": "Hi", "truncation": truncation})
    assert short.json()["truncation"] == "disabled"


def test_untruncatable_conversation_is_refused(server, error):
    last = {"role": "user", "content": LONG * 12}
    found = error(ask(server, [*conversation(2), last]), 400)
    assert "maximum context length is 256" in found["message"]
    # An answer shorter than asked for is better than none, as it is without truncation.
    last = {"role": "user", "content": LONG * 4}
    assert ask(server, [*conversation(2), last], max_output_tokens=250).status_code == 200
    _, prompt, params = server.client.requests[0]
    assert prompt == server.tokenizer.encode_chat([last])
    assert params.max_tokens == CONTEXT - len(prompt)


def test_tool_call_is_removed_with_its_output(make_server):
    config = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    server = make_server(config)
    asked = {"role": "user", "content": "Compare the weather."}
    items = [asked]
    for number in range(10):
        call = {"call_id": f"call_{number}", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
        items.append({"type": "function_call", **call})
        output = {"call_id": f"call_{number}", "output": f"{number} degrees. {LONG}"}
        items.append({"type": "function_call_output", **output})
    reply = ask(server, items, tools=[TOOL], max_output_tokens=20)
    assert reply.status_code == 200, reply.text
    text = server.tokenizer.decode(server.client.requests[0][1], False)
    assert "Compare the weather." in text and "9 degrees" in text and "0 degrees" not in text
    kept = [number for number in range(10) if f"{number} degrees" in text]
    assert kept == list(range(kept[0], 10)) and len(server.client.requests[0][1]) + 20 <= CONTEXT


def test_long_conversation_is_not_encoded_message_by_message(server, monkeypatch):
    calls = []
    render = type(server.tokenizer).chat_prompt

    def counted(self, *arguments, **fields):
        calls.append(1)
        return render(self, *arguments, **fields)

    monkeypatch.setattr(type(server.tokenizer), "chat_prompt", counted)
    said = [{"role": "user", "content": "Hello."}] * 1000
    assert ask(server, said).status_code == 200
    assert len(calls) <= 13


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncation": "start"}, "truncation"),
        ({"truncate_prompt_tokens": 5}, "truncation"),
    ],
)
def test_invalid_truncation_values_are_refused(server, error, fields, param):
    assert error(ask(server, conversation(1), **fields), 400)["param"] == param
