"""JSON schemas of calls that are JSON as a whole."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def call_schema(tools: Mapping[str, Schema], key: str) -> dict[str, Any]:
    """Schema of one call of one of the tools; `key`: name of its arguments field.

    Each tool's schema is a definition, and its references are moved there.
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
    """Schema of a list of at least one call."""
    call = call_schema(tools, key)
    definitions = {"$defs": call.pop("$defs")}
    most = {"maxItems": 1} if is_single else {}
    return definitions | {"type": "array", "items": call, "minItems": 1, **most}


def moved_references(value: Any, to: str) -> Any:
    """Copy a schema that becomes a part of another, at the reference `to`."""
    if isinstance(value, list):
        return [moved_references(each, to) for each in value]
    if not isinstance(value, Mapping):
        return value
    copy = {name: moved_references(each, to) for name, each in value.items() if name != "$schema"}
    reference = copy.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = to + reference[1:]
    return copy
