"""Facts about a JSON schema: its types, its values, and whether it is disjoint from another."""

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from typing import Any
from urllib.parse import unquote

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
        *("writeOnly", "$comment", "$schema", "$id", "id", "$defs", "definitions", "nullable"),
        *("contentEncoding", "contentMediaType", "discriminator"),
    }
)
MAX_VALUES = 64
MAX_HOPS = 32  # maximum length of a chain of references

Schema = dict[str, Any] | bool


class Unsupported(ValueError):
    """A keyword cannot be rewritten."""


class Recursive(Unsupported):
    """A negation, or a reference, contains itself."""


def resolved(schema: Schema, root: Schema) -> Schema:
    """Return a schema with its own local reference replaced by the target. Raises Unsupported."""
    for _ in range(MAX_HOPS):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        target = lookup(schema["$ref"], root)
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        if rest.keys() - ANNOTATIONS and isinstance(target, dict):
            return rest | {"allOf": [*rest.get("allOf", ()), target]}
        schema = target
    raise Unsupported("references in a circle")


def lookup(reference: Any, root: Schema) -> Schema:
    """Return the schema that a local reference points to. Raises Unsupported."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise Unsupported("a reference to another document or to an anchor")
    found: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise Unsupported("a reference to nothing") from None
    if not isinstance(found, dict | bool):
        raise Unsupported("a reference to no schema")
    return found


def check_references(schema: Schema, root: Schema, checked: set[int]) -> None:
    """Raise Recursive if references of a schema lead in a circle, so that they state nothing.

    checked: ids of the schemas that earlier calls found to be right; this call adds to them
    """
    path: list[tuple[int, Iterator[Schema]]] = []
    on_path: set[int] = set()
    each = schema
    while True:
        if isinstance(each, dict) and id(each) not in checked:
            if id(each) in on_path:
                reference = each.get("$ref", "#")
                raise Recursive(f"$ref {reference!r:.100} leads back to itself")
            on_path.add(id(each))
            path.append((id(each), iter(_stated_by(each, root))))
        while path:
            number, parts = path[-1]
            each = next(parts, None)
            if each is not None:
                break
            path.pop()
            on_path.remove(number)
            checked.add(number)
        else:
            return


def _stated_by(schema: dict, root: Schema) -> list[Schema]:
    """Return the schemas that a schema's values must fit because of `$ref` and `allOf`."""
    parts = schema.get("allOf")
    found = list(parts) if isinstance(parts, list) else []
    if "$ref" in schema:
        with suppress(Unsupported):  # llguidance will report the error
            found.append(lookup(schema["$ref"], root))
    return found


def types_of(schema: Schema) -> frozenset[str]:
    """Return the types that a schema's own keywords allow. "number" implies "integer"."""
    if not isinstance(schema, dict):
        return ALL_TYPES if schema else frozenset()
    found = ALL_TYPES
    if (stated := schema.get("type")) is not None:
        names = frozenset([stated] if isinstance(stated, str) else stated)
        found &= names | ({"integer"} if "number" in names else frozenset())
    if (values := own_values(schema)) is not None:
        found &= frozenset().union(*(_types_of_value(value) for value in values))
    return found


def own_values(schema: Schema) -> list | None:
    """Return the values of `const` or `enum`; None if there is neither."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types_of_value(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    names = {str: "string", float: "number", type(None): "null", dict: "object", list: "array"}
    return frozenset({names[type(value)]})


def is_same(first: Any, second: Any) -> bool:
    """Return True if two JSON values are equal. 1 equals 1.0, but not true."""
    if isinstance(first, dict | list) or isinstance(second, dict | list):
        return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def distinct(values: list) -> list:
    found: list = []
    for value in values:
        if not any(is_same(value, each) for each in found):
            found.append(value)
    return found


def finite_values(schema: Schema, root: Schema) -> list | None:
    """Return all values of a schema if it has few, else None."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    values = own_values(schema)
    if values is not None:
        stated = types_of({"type": schema["type"]}) if "type" in schema else ALL_TYPES
        values = [value for value in values if _types_of_value(value) & stated]
        further = schema.keys() - ANNOTATIONS - {"const", "enum", "type"}
        return values if not further and len(values) <= MAX_VALUES else None
    keywords = schema.keys() - ANNOTATIONS
    if keywords == {"type"} and schema["type"] in ("boolean", "null"):
        return [True, False] if schema["type"] == "boolean" else [None]
    if keywords == {"type", "minimum", "maximum"} and schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        if isinstance(low, int) and isinstance(high, int) and high - low < MAX_VALUES:
            return list(range(low, high + 1))
    if keywords in ({"anyOf"}, {"oneOf"}):
        found: list = []
        for each in schema.get("anyOf") or schema.get("oneOf"):
            values = finite_values(each, root)
            if values is None:
                return None
            found += values
        return found if len(found) <= MAX_VALUES else None
    return None


def are_disjoint(branches: list[Schema], root: Schema) -> bool:
    """Return True if simple checks prove that no value matches two of the schemas."""
    try:
        schemas = [resolved(each, root) for each in branches]
        return all(_is_disjoint(a, b, root, 4) for a, b in combinations(schemas, 2))
    except Unsupported:
        return False


def _is_disjoint(first: Schema, second: Schema, root: Schema, depth: int) -> bool:
    first, second = resolved(first, root), resolved(second, root)
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict) or not depth:
        return False
    common = types_of(first) & types_of(second)
    if not common:
        return True
    a, b = own_values(first), own_values(second)
    if a is not None and b is not None:
        return not any(is_same(x, y) for x in a for y in b)
    if common <= {"integer", "number"}:
        low, high = "minimum", "maximum"
        pairs = ((first, second), (second, first))
        return any(x.get(high, float("inf")) < y.get(low, float("-inf")) for x, y in pairs)
    if common != {"object"}:
        return False
    for x, y in ((first, second), (second, first)):
        for name in x.get("required", ()):
            named = y.get("properties") or {}
            is_closed = y.get("additionalProperties", True) is False
            if name not in named and is_closed and not y.get("patternProperties"):
                return True
            own = x.get("properties") or {}
            if name not in named or name not in own:
                continue
            if _is_disjoint(own[name], named[name], root, depth - 1):
                return True
    return False
