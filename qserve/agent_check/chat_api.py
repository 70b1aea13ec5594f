"""OpenAI's chat completions: builds requests, and checks and reads replies and streams."""

import json
from collections.abc import Iterable
from typing import Any

from qserve.agent_check.conversation import (
    AUTO,
    NONE,
    REQUIRED,
    Answer,
    Ask,
    Call,
    OpenCall,
    expect,
)

PATH = "/chat/completions"


def arguments_of(text: str) -> dict[str, Any] | None:
    """Parse the arguments of a call; None: not a JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def body(ask: Ask) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": ask.system}]
    for turn in ask.turns:
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
        elif isinstance(turn, Answer):
            messages.append(turn.raw)
        else:
            messages += [
                {"role": "tool", "tool_call_id": result.call.id, "content": result.text}
                for result in turn
            ]
    fields: dict[str, Any] = {"messages": messages, "max_tokens": ask.max_tokens}
    if not ask.tools:
        return fields
    choice: Any = ask.choice
    if choice not in (AUTO, REQUIRED, NONE):
        choice = {"type": "function", "function": {"name": choice}}
    fields["tools"] = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.schema,
            },
        }
        for tool in ask.tools
    ]
    return fields | {"tool_choice": choice, "parallel_tool_calls": ask.is_parallel}


def whole(reply: dict[str, Any]) -> Answer:
    (choice,) = reply["choices"]
    message = choice["message"]
    for call in message.get("tool_calls") or ():
        expect(call["type"] == "function", f"a call has the type {call['type']!r}")
    return _answer(message, choice["finish_reason"])


def streamed(events: Iterable[dict[str, Any]]) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, OpenCall] = {}
    ending = None
    for event in events:
        for choice in event["choices"]:
            expect(ending is None, "a chunk follows the one with the finish_reason")
            ending = choice["finish_reason"]
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                _take(calls, part)
    expect(ending is not None, "the stream has no finish_reason")
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.pieces)},
            }
            for _, call in sorted(calls.items())
        ]
    return _answer(message, ending)


def _take(calls: dict[int, OpenCall], part: dict[str, Any]) -> None:
    function = part["function"]
    if part["index"] not in calls:
        expect(part["index"] == len(calls), "indices of calls have a gap")
        expect(part.get("id") and function.get("name"), "a call begins without id or name")
        calls[part["index"]] = OpenCall(id=part["id"], name=function["name"])
    else:
        expect("id" not in part or part["id"] is None, "a call has its id twice")
    calls[part["index"]].pieces.append(function.get("arguments") or "")


def _answer(message: dict[str, Any], ending: str) -> Answer:
    calls = tuple(
        Call(
            id=call["id"],
            name=call["function"]["name"],
            arguments=arguments_of(call["function"]["arguments"]),
        )
        for call in message.get("tool_calls") or ()
    )
    if ending != "length":
        expected = "tool_calls" if calls else "stop"
        expect(ending == expected, f"finish_reason is {ending!r}, expected {expected!r}")
    return Answer(
        text=message.get("content") or "", calls=calls, is_cut=ending == "length", raw=message
    )
