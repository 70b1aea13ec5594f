"""The fields of a chat's message, and of its deltas, that come of parsed text."""

import secrets
import string

from qserve.output_parsing.output_parser import Message, ParseSettings
from qserve.output_parsing.pieces import ARGUMENTS, CONTENT, NAME, REASONING, Piece

LETTERS = string.ascii_letters + string.digits
MISTRAL_ID = 9  # characters, as its chat template demands of ids that come back


def new_call_id(parsing: ParseSettings) -> str:
    """The id of a call; unique, as clients keep the calls of a conversation by it."""
    if parsing.tool_parser == "mistral":
        return "".join(secrets.choice(LETTERS) for _ in range(MISTRAL_ID))
    return f"call_{secrets.token_hex(12)}"


def message_fields(found: Message, parsing: ParseSettings) -> dict:
    """Of a whole message."""
    fields: dict = {"content": found.content}
    if parsing.reasoning_parser is not None:
        fields["reasoning_content"] = found.reasoning or None
    if found.calls:
        fields["content"] = found.content or None
        fields["tool_calls"] = [
            {
                "id": new_call_id(parsing),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in found.calls
        ]
    return fields


def delta_fields(pieces: list[Piece], parsing: ParseSettings) -> dict:
    """Of the pieces of one delta; each call has one entry."""
    fields: dict = {}
    calls: dict[int, dict] = {}
    for kind, text, index in pieces:
        if kind == CONTENT:
            fields["content"] = fields.get("content", "") + text
        elif kind == REASONING:
            fields["reasoning_content"] = fields.get("reasoning_content", "") + text
        elif kind == NAME:
            function = {"name": text, "arguments": ""}
            opening = {"index": index, "id": new_call_id(parsing), "type": "function"}
            calls[index] = opening | {"function": function}
        elif kind == ARGUMENTS:
            entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += text
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields
