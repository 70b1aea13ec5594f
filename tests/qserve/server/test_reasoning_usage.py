"""How many tokens a model thought with, on both routes, whole and streamed."""

import json

import pytest

from qserve.config import ServerConfig

THOUGHT, ANSWER = "Hmm, let me see.", "It is so."


def counts(server, chunks, **fields):
    """Return the usage that each form of the request reports."""
    body = {"input": "Hi", **fields}
    if "max_tokens" in body:
        body["max_output_tokens"] = body.pop("max_tokens")
    whole = server.chat(**fields).json()["usage"]
    response = server.post("/v1/responses", body).json()["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chunks(server.chat(**fields, **options))[-1]["usage"]
    events = server.post("/v1/responses", body | {"stream": True}).text.rstrip("\n").split("\n\n")
    last = json.loads(events[-1].partition("data: ")[2])["response"]["usage"]
    assert streamed == whole and last == response
    found = whole.get("completion_tokens_details", {}).get("reasoning_tokens")
    assert response["output_tokens_details"]["reasoning_tokens"] == (found or 0)
    return found


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("deepseek_r1", f"<think>{THOUGHT}</think>"),
        ("deepseek_r1", f"{THOUGHT}</think>"),
        ("qwen3", f"\n<think>\n{THOUGHT}\n</think>"),
        ("qwen3", ""),
        (None, f"<think>{THOUGHT}</think>"),
    ],
)
def test_tokens_of_reasoning_are_counted(make_server, chunks, parser, text):
    server = make_server(ServerConfig(reasoning_parser=parser))
    server.client.text = text + ANSWER
    found = counts(server, chunks)
    if parser is None:
        assert found is None
        return
    tokens = server.tokenizer.encode(server.client.text)
    # A token that holds the end of the mark and the first of the answer counts once, as reasoning.
    lengths = [len(server.tokenizer.decode(tokens[:count])) for count in range(len(tokens) + 1)]
    expected = next(count for count, length in enumerate(lengths) if length >= len(text))
    assert found == expected


def test_truncated_reasoning_counts_as_reasoning(make_server, chunks):
    server = make_server(ServerConfig(reasoning_parser="deepseek_r1"))
    server.client.text = THOUGHT * 5
    assert counts(server, chunks, max_tokens=7) == 7


@pytest.mark.parametrize("include", [True, False, None])
def test_include_reasoning_decides_what_a_chat_shows(make_server, chunks, include):
    server = make_server(ServerConfig(reasoning_parser="deepseek_r1"))
    server.client.text = f"{THOUGHT}</think>{ANSWER}"
    reply = server.chat(include_reasoning=include)
    message = reply.json()["choices"][0]["message"]
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in chunks(server.chat(include_reasoning=include, stream=True))
    ]
    streamed = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert message["content"] == "".join(delta.get("content", "") for delta in deltas) == ANSWER
    if include is False:
        assert "reasoning_content" not in message
        assert not any("reasoning_content" in delta for delta in deltas)
    else:
        assert message["reasoning_content"] == streamed == THOUGHT
    assert reply.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert "x-ignored-fields" not in reply.headers


def test_include_reasoning_has_no_effect_without_a_parser(server):
    reply = server.chat(include_reasoning=False)
    assert reply.headers["x-ignored-fields"] == "include_reasoning"


def test_reasoning_tokens_sum_over_outputs(make_server):
    server = make_server(ServerConfig(reasoning_parser="deepseek_r1"))
    server.client.text = f"{THOUGHT}</think>{ANSWER}"
    one, two = (server.chat(n=n).json()["usage"]["completion_tokens_details"] for n in (1, 2))
    assert two["reasoning_tokens"] == 2 * one["reasoning_tokens"] > 0


def test_reasoning_is_accepted_under_both_names(server, monkeypatch):
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
    monkeypatch.setattr(server.tokenizer._tokenizer, "chat_template", template)
    for fields in ({"reasoning": "Hm."}, {"reasoning_content": "Hm."}):
        reply = server.chat(messages=[{"role": "assistant", "content": "a", **fields}])
        assert "x-ignored-fields" not in reply.headers
    texts = [server.tokenizer.decode(request[1]) for request in server.client.requests]
    assert texts == ["[Hm.]a"] * 2
