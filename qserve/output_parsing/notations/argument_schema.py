"""ArgumentSchema: the JSON types that a tool's schema allows for each argument.

It resolves local references, `allOf`, `anyOf`, `oneOf`, `enum` and `const`. It does not check other
keywords, such as `minimum`, which do not affect the type.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote

Kinds = frozenset[str]

# Sets with "number" also have "integer", since integers are numbers in JSON Schema.
ALL: Kinds = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
NUMBER: Kinds = frozenset({"integer", "number"})
# JSON type -> keywords that imply this type in a schema without `type`.
IMPLIED = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "format", "minLength", "maxLength"),
}
MAX_CHECKS = 1000  # schemas visited to check one value
MAX_PATTERN_CHARS = 256
MAX_KEY_CHARS = 128  # longer keys are not matched against patterns
MAX_REPEATS = 3  # repeats in a pattern; the time to match is exponential in their number


class ArgumentSchema:
    """Schema of a tool's arguments, for formats that write values as bare text.

    `root`: JSON schema of the arguments object. If `root` is not an object, anything is allowed.
    """

    def __init__(self, root: Any) -> None:
        self._root = root if isinstance(root, Mapping) else {}
        self._kinds: dict[int, Kinds | None] = {}  # id() of a schema -> types; None: in computation

    def of(self, key: str) -> list[Any]:
        """Return the schemas of the argument `key`; [] if the tool does not define it.

        Any of the schemas may apply: they are alternatives, or belong to patterns that may match.
        """
        found: list[Any] = []
        for part in self._parts:
            properties = part.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                found.append(properties[key])
        if found:
            return found
        for part in self._parts:
            patterns = part.get("patternProperties")
            if isinstance(patterns, Mapping):
                found += [each for pattern, each in patterns.items() if _may_match(pattern, key)]
        if found:
            return found
        others = (part.get("additionalProperties") for part in self._parts)
        return [each for each in others if isinstance(each, Mapping)]

    @cached_property
    def keys(self) -> list[str]:
        """Names of the arguments in the schema, in order."""
        named = (part.get("properties") for part in self._parts)
        found = (key for each in named if isinstance(each, Mapping) for key in each)
        return list(dict.fromkeys(found))

    def kinds(self, schemas: Iterable[Any]) -> Kinds:
        """Return the JSON types that any of the schemas allows; string if no type is stated."""
        stated = [self._kinds_of(schema) for schema in schemas]
        known = [kinds for kinds in stated if kinds != ALL]
        if not known:
            return frozenset({"string"})
        extra = {"string"} if len(known) < len(stated) else set()
        return frozenset(extra).union(*known) or frozenset({"string"})

    def allows(self, schemas: Iterable[Any], value: Any) -> bool:
        """Return True if a schema allows a value's type, and the value if it lists constants."""
        budget = [MAX_CHECKS]
        return any(self._fits(schema, value, budget) for schema in schemas)

    @cached_property
    def _parts(self) -> list[Mapping]:
        """The root schema and the schemas that it is composed of."""
        parts: list[Mapping] = []
        seen: set[int] = set()
        waiting: list[Any] = [self._root]
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            parts.append(schema)
            for branches in ("allOf", "anyOf", "oneOf"):
                if isinstance(schema.get(branches), list):
                    waiting += reversed(schema[branches])
            waiting += [schema.get(name) for name in ("then", "else")]
            waiting.append(self._target(schema))
        return parts

    def _kinds_of(self, schema: Any) -> Kinds:
        """Return the types that a schema allows; ALL if it states no type or contains itself."""
        if not isinstance(schema, Mapping):
            return ALL
        known = self._kinds.get(id(schema), ALL)
        if id(schema) in self._kinds:
            return ALL if known is None else known
        self._kinds[id(schema)] = None
        try:
            kinds = self._computed(schema)
        except RecursionError:
            kinds = ALL
        self._kinds[id(schema)] = kinds
        return kinds

    def _computed(self, schema: Mapping) -> Kinds:
        stated = schema.get("type")
        names = stated if isinstance(stated, list) else [stated]
        kinds = frozenset(name for name in names if isinstance(name, str)) & ALL or ALL
        if "number" in kinds:
            kinds |= NUMBER
        if "const" in schema:
            kinds &= _kinds_of_value(schema["const"])
        if isinstance(schema.get("enum"), list):
            kinds &= frozenset().union(*map(_kinds_of_value, schema["enum"]))
        target = self._target(schema)
        if target is not None:
            kinds &= self._kinds_of(target)
        for each in schema.get("allOf") if isinstance(schema.get("allOf"), list) else ():
            kinds &= self._kinds_of(each)
        for branches in ("anyOf", "oneOf"):
            if isinstance(schema.get(branches), list):
                kinds &= frozenset().union(*map(self._kinds_of, schema[branches]))
        if kinds == ALL:
            implied = (kind for kind, words in IMPLIED.items() if any(w in schema for w in words))
            kind = next(implied, None)
            kinds = ALL if kind is None else NUMBER if kind == "number" else frozenset({kind})
        if schema.get("nullable") is True and kinds != ALL:  # OpenAPI 3.0
            kinds |= {"null"}
        return kinds

    def _fits(self, schema: Any, value: Any, budget: list[int]) -> bool:
        budget[0] -= 1
        if not isinstance(schema, Mapping) or budget[0] < 0:
            return True
        if schema.get("nullable") is True and value is None:
            return True
        own = {name: schema[name] for name in ("type", "enum", "const") if name in schema}
        if not _kinds_of_value(value) & self._computed(own):
            return False
        constants = schema.get("enum")
        if isinstance(constants, list) and not any(_is_same(value, each) for each in constants):
            return False
        if "const" in schema and not _is_same(value, schema["const"]):
            return False
        target = self._target(schema)
        if target is not None and not self._fits(target, value, budget):
            return False
        every = schema.get("allOf")
        if isinstance(every, list) and not all(self._fits(s, value, budget) for s in every):
            return False
        return all(
            any(self._fits(each, value, budget) for each in schema[branches])
            for branches in ("anyOf", "oneOf")
            if isinstance(schema.get(branches), list)
        )

    def _target(self, schema: Mapping) -> Any:
        """Return the target of a schema's local `$ref`, or None."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        if reference != "#" and not reference.startswith("#/"):
            return self._anchored(reference[1:])
        found: Any = self._root
        for name in reference[1:].split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found

    def _anchored(self, name: str) -> Any:
        """Return the definition with this `$anchor`, or None."""
        for place in ("$defs", "definitions"):
            found = self._root.get(place)
            for each in found.values() if isinstance(found, Mapping) else ():
                if isinstance(each, Mapping) and each.get("$anchor") == name:
                    return each
        return None


def _kinds_of_value(value: Any) -> Kinds:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return NUMBER
    for kind, name in ((float, "number"), (str, "string"), (Mapping, "object"), (list, "array")):
        if isinstance(value, kind):
            return frozenset({name})
    return frozenset()


def _is_same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _may_match(pattern: str, key: str) -> bool:
    """Return True if a key matches a pattern, or if the pattern might take long to match."""
    if len(pattern) > MAX_PATTERN_CHARS or len(key) > MAX_KEY_CHARS:
        return True
    num_repeats = sum(pattern.count(sign) for sign in "*+{?")
    if num_repeats > MAX_REPEATS or re.search(r"\)[*+{?]|\\[1-9]|\(\?", pattern):
        return True
    try:
        return re.search(pattern, key) is not None
    except re.error:
        return True
