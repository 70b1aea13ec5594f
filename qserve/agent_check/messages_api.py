"""Anthropic's Messages API: builds requests, and checks and reads replies and streams."""

from collections.abc import Iterable
from typing import Any

from qserve.agent_check.chat_api import arguments_of
from qserve.agent_check.conversation import (
    AUTO,
    NONE,
    REQUIRED,
    Answer,
    Ask,
    Call,
    expect,
)

PATH = "/messages"
CHOICES = {AUTO: "auto", REQUIRED: "any", NONE: "none"}
# type of a delta -> type of its block, field with the text
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}


def body(ask: Ask) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for turn in ask.turns:
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
        elif isinstance(turn, Answer):
            messages.append({"role": "assistant", "content": turn.raw})
        else:
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": result.call.id,
                    "content": result.text,
                    "is_error": result.is_error,
                }
                for result in turn
            ]
            messages.append({"role": "user", "content": results})
    fields: dict[str, Any] = {
        "messages": messages,
        "max_tokens": ask.max_tokens,
        "system": [{"type": "text", "text": ask.system}],
    }
    if not ask.tools:
        return fields
    choice: dict[str, Any] = {"type": "tool", "name": ask.choice}
    if ask.choice in CHOICES:
        choice = {"type": CHOICES[ask.choice]}
    if not ask.is_parallel and ask.choice != NONE:
        choice["disable_parallel_tool_use"] = True
    fields["tools"] = [
        {"name": tool.name, "description": tool.description, "input_schema": tool.schema}
        for tool in ask.tools
    ]
    return fields | {"tool_choice": choice}


def whole(reply: dict[str, Any]) -> Answer:
    expect(reply["type"] == "message", f"the type is {reply['type']!r}")
    return _answer(reply["content"], reply["stop_reason"], reply["usage"])


def streamed(events: Iterable[dict[str, Any]]) -> Answer:
    content: list[dict[str, Any]] = []
    pieces: list[str] = []
    expected = {"message_start"}
    reason, usage = None, {}
    for event in events:
        kind = event["type"]
        if kind == "ping":
            expect("message_start" not in expected, "a ping comes before message_start")
            continue
        expect(kind in expected, f"{kind} comes where {' or '.join(sorted(expected))} must")
        if kind == "message_start":
            usage, expected = event["message"]["usage"], {"content_block_start", "message_delta"}
        elif kind == "content_block_start":
            expect(event["index"] == len(content), "indices of blocks have a gap")
            content.append(dict(event["content_block"]))
            pieces, expected = [], {"content_block_delta", "content_block_stop"}
        elif kind == "content_block_delta":
            _take(content[-1], event["delta"], pieces)
        elif kind == "content_block_stop":
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = arguments_of("".join(pieces))
            expected = {"content_block_start", "message_delta"}
        elif kind == "message_delta":
            reason, usage = event["delta"]["stop_reason"], usage | event["usage"]
            expected = {"message_stop"}
        else:
            expected = {"nothing"}
    expect(expected == {"nothing"}, "the stream ends before message_stop")
    return _answer(content, reason, usage)


def _take(block: dict[str, Any], delta: dict[str, Any], pieces: list[str]) -> None:
    of_block, field = DELTAS[delta["type"]]
    expect(block["type"] == of_block, f"a {delta['type']} comes in a {block['type']} block")
    if field == "partial_json":
        pieces.append(delta[field])
    else:
        block[field] += delta[field]


def _answer(content: list[dict[str, Any]], reason: str | None, usage: dict[str, Any]) -> Answer:
    expect(usage["output_tokens"] > 0, "usage counts no output tokens")
    calls = tuple(
        Call(id=block["id"], name=block["name"], arguments=block["input"])
        for block in content
        if block["type"] == "tool_use"
    )
    is_cut = reason in ("max_tokens", "model_context_window_exceeded")
    if not is_cut:
        expected = "tool_use" if calls else "end_turn"
        expect(reason == expected, f"stop_reason is {reason!r}, expected {expected!r}")
    text = "".join(block["text"] for block in content if block["type"] == "text")
    return Answer(text=text, calls=calls, is_cut=is_cut, raw=content)
