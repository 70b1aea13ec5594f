"""Items as they are stored: each with a type, an id and, where the type has one, a status."""

import secrets
from typing import Any

ID_BYTES = 24
# type of an item: the prefix of its id
PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}
PART_TYPES = {"assistant": "output_text"}


def stored_item(item: dict[str, Any], *, keeps_id: bool = True) -> dict[str, Any]:
    """Complete an item of a client: add its type, id and status; a text becomes a part."""
    kind = item.get("type", "message")
    found = {"type": kind, **item}
    if not keeps_id or not isinstance(found.get("id"), str):
        found["id"] = PREFIXES.get(kind, "item_") + secrets.token_hex(ID_BYTES)
    if kind != "reasoning":
        found.setdefault("status", "completed")
    if kind == "message" and isinstance(found.get("content"), str):
        part = PART_TYPES.get(found.get("role", ""), "input_text")
        found["content"] = [{"type": part, "text": found["content"]}]
    return found
