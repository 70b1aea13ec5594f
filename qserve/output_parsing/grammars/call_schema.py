"""JSON schemas of whole calls, for formats that write calls as JSON."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def call_schema(tools: Mapping[str, Schema], key: str) -> dict[str, Any]:
    """Return the schema of a call of any of the tools. `key`: name of the field for arguments.

    Each tool's schema becomes a definition in `$defs`, and its references are adapted.
    """
    definitions = {
        str(index): moved_references(schema, f"#/$defs/{index}")
        for index, schema in enumerate(tools.values())
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{index}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for index, name in enumerate(tools)
    ]
    return {"$defs": definitions} | ({"anyOf": calls} if len(calls) > 1 else calls[0])


def list_schema(tools: Mapping[str, Schema], key: str, *, is_single: bool) -> dict[str, Any]:
    """Return the schema of a list of at least one call."""
    call = call_schema(tools, key)
    definitions = {"$defs": call.pop("$defs")}
    most = {"maxItems": 1} if is_single else {}
    return definitions | {"type": "array", "items": call, "minItems": 1, **most}


def moved_references(value: Any, to: str) -> Any:
    """Copy a schema with adapted references, for embedding in another schema at `to`."""
    if isinstance(value, list):
        return [moved_references(each, to) for each in value]
    if not isinstance(value, Mapping):
        return value
    copy = {name: moved_references(each, to) for name, each in value.items() if name != "$schema"}
    reference = copy.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = to + reference[1:]
    return copy
