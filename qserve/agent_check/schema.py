"""Validator of arguments for the JSON schemas of the tasks' tools, which use few keywords."""

from typing import Any

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
KEYWORDS = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "items", "enum", "minimum"),
        *("maximum", "minLength", "maxLength", "minItems", "maxItems", "description"),
    )
)


def fault(schema: dict[str, Any], value: Any, path: str = "arguments") -> str | None:
    """Return the first violation of a schema; None if the value is valid."""
    if unknown := schema.keys() - KEYWORDS:
        raise ValueError(f"keywords that this check does not know: {sorted(unknown)}")
    kind = schema.get("type")
    is_bool = isinstance(value, bool)
    if kind is not None and (not isinstance(value, TYPES[kind]) or is_bool != (kind == "boolean")):
        return f"{path}: expected {kind}, found {value!r:.60}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{path}: expected one of {schema['enum']}, found {value!r:.60}"
    if isinstance(value, dict):
        return _object_fault(schema, value, path)
    size, low, high = value, schema.get("minimum"), schema.get("maximum")
    if isinstance(value, str | list):
        kind = "Length" if isinstance(value, str) else "Items"
        size, low, high = len(value), schema.get(f"min{kind}"), schema.get(f"max{kind}")
    if (low is not None and size < low) or (high is not None and size > high):
        return f"{path}: expected {low} to {high}, found {value!r:.60}"
    if isinstance(value, list) and "items" in schema:
        faults = (fault(schema["items"], each, f"{path}.{i}") for i, each in enumerate(value))
        return next(filter(None, faults), None)
    return None


def _object_fault(schema: dict[str, Any], value: dict[str, Any], path: str) -> str | None:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"{path}: {name} is missing"
    if schema.get("additionalProperties") is False and value.keys() - known.keys():
        return f"{path}: unexpected {sorted(value.keys() - known.keys())}"
    faults = (
        fault(known[name], each, f"{path}.{name}") for name, each in value.items() if name in known
    )
    return next(filter(None, faults), None)
