"""Completes items for the store: each gets a type, an id and, except reasoning, a status."""

import secrets
from typing import Any

ID_BYTES = 24
# item type -> prefix of the id
PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}
PART_TYPES = {"assistant": "output_text"}


def stored_item(item: dict[str, Any], *, keeps_id: bool = True) -> dict[str, Any]:
    """Return a client's item with type, id and status. A text becomes a list of one part."""
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
