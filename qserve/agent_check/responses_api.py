"""OpenAI's Responses API: builds requests, and checks and reads replies and streams."""

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

PATH = "/responses"
DELTAS = {
    "response.output_text.delta": "message",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
}
ENDINGS = ("response.completed", "response.incomplete")


def body(ask: Ask) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for turn in ask.turns:
        if isinstance(turn, str):
            items.append({"role": "user", "content": turn})
        elif isinstance(turn, Answer):
            items += turn.raw
        else:
            items += [
                {
                    "type": "function_call_output",
                    "call_id": result.call.id,
                    "output": result.text,
                }
                for result in turn
            ]
    fields: dict[str, Any] = {
        "input": items,
        "instructions": ask.system,
        "max_output_tokens": ask.max_tokens,
        "store": False,
    }
    if not ask.tools:
        return fields
    choice: Any = ask.choice
    if choice not in (AUTO, REQUIRED, NONE):
        choice = {"type": "function", "name": choice}
    fields["tools"] = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.schema,
            "strict": False,
        }
        for tool in ask.tools
    ]
    return fields | {"tool_choice": choice, "parallel_tool_calls": ask.is_parallel}


def whole(reply: dict[str, Any]) -> Answer:
    is_cut = reply["status"] == "incomplete"
    expect(is_cut or reply["status"] == "completed", f"the status is {reply['status']!r}")
    texts = [
        part["text"]
        for item in reply["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]
    calls = tuple(
        Call(
            id=item["call_id"],
            name=item["name"],
            arguments=arguments_of(item["arguments"]),
        )
        for item in reply["output"]
        if item["type"] == "function_call"
    )
    return Answer(text="".join(texts), calls=calls, is_cut=is_cut, raw=reply["output"])


def streamed(events: Iterable[dict[str, Any]]) -> Answer:
    pieces: dict[str, list[str]] = {}  # item id -> deltas
    added: list[str] = []
    done: list[dict[str, Any]] = []
    final = None
    for number, event in enumerate(events):
        expect(final is None, "an event follows the last one")
        expect(event["sequence_number"] == number, "sequence numbers have a gap")
        kind = event["type"]
        if kind == "response.output_item.added":
            expect(event["output_index"] == len(added), "indices of items have a gap")
            added.append(event["item"]["id"])
            pieces[event["item"]["id"]] = []
        elif kind in DELTAS:
            expect(event["item_id"] in pieces, "a delta comes before its item")
            pieces[event["item_id"]].append(event["delta"])
        elif kind == "response.output_item.done":
            done.append(event["item"])
        elif kind in ENDINGS:
            final = event["response"]
    expect(final is not None, "the stream has no last event")
    expect(done == final["output"], "items of the last event differ from those before it")
    for item in done:
        text = item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
        joined = "".join(pieces[item["id"]])
        expect(joined == text, f"the deltas of a {item['type']} differ from the item")
    return whole(final)
