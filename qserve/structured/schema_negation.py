"""Negation: negates a JSON schema without the keyword `not`."""

from typing import Any

from qserve.structured.pattern_algebra import UnsupportedPattern
from qserve.structured.pattern_rewrite import literals, rewrite
from qserve.structured.schema_facts import (
    ANNOTATIONS,
    Recursive,
    Schema,
    Unsupported,
    distinct,
    is_same,
    lookup,
    own_values,
    types_of,
)

MAX_PARTS = 4096  # maximum number of schemas negated for one document
# keyword -> (type, opposite keyword, offset to add to the value)
CONTRARY = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


class Negation:
    """Negates schemas within one document, `root`."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_parts = 0

    def of(self, schema: Schema, base: Schema, names: tuple[str, ...] = ()) -> Schema:
        """Return a schema of values of `base` that do not match `schema`. It may be too narrow.

        `names`: references followed so far. Raises Unsupported, and Recursive for a reference that
        contains itself.
        """
        if not isinstance(schema, dict):
            return not schema
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise Unsupported("too many parts")
        types, found = types_of(base), []
        for keyword, value in schema.items():
            if keyword not in ANNOTATIONS:
                found += self._parts(keyword, value, base, types, names)
        if any(part is True for part in found):
            return True
        found = [part for part in found if part is not False and types_of(part) & types]
        if not found:
            return False
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _parts(
        self, keyword: str, value: Any, base: Schema, types: frozenset[str], names: tuple[str, ...]
    ) -> list[Schema]:
        """Return alternative schemas that each contradict one keyword."""
        if keyword in CONTRARY:
            kind, contrary, change = CONTRARY[keyword]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise Unsupported(f"{keyword} in its older form")
            is_whole = kind == "number" and "number" not in types
            least = 0 if change else float("-inf")
            form = {"type": "integer" if is_whole else kind, contrary: value + change}
            return [form] if value + change >= least else []
        if keyword == "type":
            return self._other_types(value, types)
        if keyword in ("const", "enum"):
            return self._other_values([value] if keyword == "const" else value, base, types)
        if keyword == "pattern":
            try:
                return [{"type": "string", "pattern": rewrite((), (value,))}]
            except UnsupportedPattern as error:
                raise Unsupported(str(error)) from None
        if keyword == "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        if keyword == "properties":
            return self._of_properties(value, base, names)
        if keyword == "items" and isinstance(value, dict):
            items = base.get("items", True) if isinstance(base, dict) else True
            inner = self.of(value, items, names)
            return [] if inner is False else [{"type": "array", "contains": inner}]
        if keyword == "not":
            return [value]
        if keyword == "allOf":
            return [self.of(each, base, names) for each in value]
        if keyword == "anyOf":
            parts = [self.of(each, base, names) for each in value]
            if any(part is False for part in parts):
                return []
            parts = [part for part in parts if part is not True]
            return [{"allOf": parts} if parts else True]
        if keyword == "$ref":
            if value in names:
                raise Recursive(f"not: {value} contains itself, which no grammar can exclude")
            return [self.of(lookup(value, self._root), base, (*names, value))]
        if keyword == "additionalProperties" and value in (True, {}):
            return []
        raise Unsupported(f"the contrary of {keyword}")

    def _of_properties(
        self, properties: dict[str, Schema], base: Schema, names: tuple[str, ...]
    ) -> list[Schema]:
        known = (base.get("properties") or {}) if isinstance(base, dict) else {}
        found: list[Schema] = []
        for name, schema in properties.items():
            inner = self.of(schema, known.get(name, True), names)
            if inner is not False:
                form = {"type": "object", "properties": {name: inner}, "required": [name]}
                found.append(form)
        return found

    @staticmethod
    def _other_types(stated: Any, types: frozenset[str]) -> list[Schema]:
        stated = {stated} if isinstance(stated, str) else set(stated)
        if stated & {"number", "integer"}:
            # A grammar cannot express "a number that is not an integer".
            stated |= {"number", "integer"}
        left = types - stated
        if "number" in left:
            left -= {"integer"}
        return [{"type": sorted(left)}] if left else []

    def _other_values(self, values: list, base: Schema, types: frozenset[str]) -> list[Schema]:
        known = own_values(base)
        if known is not None:
            left = [each for each in known if not any(is_same(each, value) for value in values)]
            return [{"enum": left}] if left else []
        found: list[Schema] = []
        texts = [value for value in values if isinstance(value, str)]
        if "string" in types:
            more = {"pattern": rewrite((), (literals(texts),))} if texts else {}
            found.append({"type": "string"} | more)
        if types & {"number", "integer"}:
            found += _other_numbers(values, "number" if "number" in types else "integer")
        flags = [each for each in (True, False) if not any(is_same(each, v) for v in values)]
        if "boolean" in types and flags:
            found.append({"enum": flags})
        if "null" in types and not any(value is None for value in values):
            found.append({"type": "null"})
        for name, kind, least in (("array", list, "minItems"), ("object", dict, "minProperties")):
            found_ones = [value for value in values if isinstance(value, kind)]
            if name in types and not any(found_ones):
                found.append({"type": name} | ({least: 1} if found_ones else {}))
        return found


def _other_numbers(values: list, kind: str) -> list[Schema]:
    numbers = sorted(
        distinct([v for v in values if isinstance(v, int | float) and not isinstance(v, bool)])
    )
    edges = [None, *numbers, None]
    found = []
    for low, high in zip(edges, edges[1:], strict=False):
        form: dict[str, Any] = {"type": kind}
        if low is not None:
            form["exclusiveMinimum"] = low
        if high is not None:
            form["exclusiveMaximum"] = high
        is_empty = kind == "integer" and None not in (low, high) and high - low <= 1
        found += [] if is_empty else [form]
    return found
