"""Converts parsed output to fields of chat messages and deltas."""

import secrets
import string

from qserve.output_parsing.output_parser import Message, ParseSettings
from qserve.output_parsing.pieces import ARGUMENTS, CONTENT, NAME, REASONING, Piece

LETTERS = string.ascii_letters + string.digits
MISTRAL_ID = 9  # characters of a call id that Mistral's chat template requires


def new_call_id(parsing: ParseSettings, name: str = "", index: int = 0) -> str:
    """Return a unique id for a tool call. Clients use it to refer to the call.

    `name` and `index` of the call are part of the id for models that write such ids themselves.
    """
    if parsing.tool_parser == "kimi_k2" and name:
        return f"functions.{name}:{parsing.num_calls_before + index}"
    if parsing.tool_parser == "mistral":
        return "".join(secrets.choice(LETTERS) for _ in range(MISTRAL_ID))
    return f"call_{secrets.token_hex(12)}"


def message_fields(found: Message, parsing: ParseSettings) -> dict:
    """Return the fields of a whole message."""
    fields: dict = {"content": found.content}
    if parsing.reasoning_parser is not None:
        fields["reasoning_content"] = found.reasoning or None
    if found.calls:
        fields["content"] = found.content or None
        fields["tool_calls"] = [
            {
                "id": new_call_id(parsing, name, index),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(found.calls)
        ]
    return fields


def delta_fields(pieces: list[Piece], parsing: ParseSettings) -> dict:
    """Return the fields of a delta. `tool_calls` has one entry per call."""
    fields: dict = {}
    calls: dict[int, dict] = {}
    for kind, text, index in pieces:
        if kind == CONTENT:
            fields["content"] = fields.get("content", "") + text
        elif kind == REASONING:
            fields["reasoning_content"] = fields.get("reasoning_content", "") + text
        elif kind == NAME:
            function = {"name": text, "arguments": ""}
            opening = {"index": index, "id": new_call_id(parsing, text, index), "type": "function"}
            calls[index] = opening | {"function": function}
        elif kind == ARGUMENTS:
            entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += text
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields
