"""Rewrites JSON schemas to the keywords that llguidance supports.

`if`, `not`, `contains`, `uniqueItems`, `dependentRequired`, `propertyNames` and others become
alternatives (`anyOf`) and intersections (`allOf`). A rewritten keyword never allows a value that
the original forbids, but it may forbid more. A keyword that cannot be rewritten within the limits
is dropped with a warning.
"""

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations, permutations
from typing import Any

from qserve.structured import schema_facts
from qserve.structured.pattern_algebra import UnsupportedPattern
from qserve.structured.pattern_rewrite import literals, rewrite
from qserve.structured.schema_facts import Unsupported, are_disjoint, finite_values
from qserve.structured.schema_negation import Negation
from qserve.structured.schema_values import bound_numbers_, in_python, patterns_of, rewrite_texts_

MAX_NODES = 20_000  # maximum number of schemas within the result
MAX_BRANCHES = 130  # maximum number of alternatives for one keyword
MAX_CHOICES = 64  # maximum number of combinations of alternatives in one schema
MAX_WARNINGS = 8
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
SCHEMAS = ("items", "additionalProperties", "additionalItems")
LISTS = ("anyOf", "allOf", "prefixItems", "items")

Schema = dict[str, Any] | bool


@lru_cache(maxsize=64)
def enforceable(text: str) -> tuple[str, tuple[str, ...]]:
    """Rewrite the JSON text of a schema. Returns the text, and warnings on dropped keywords.

    A malformed schema is returned unchanged; llguidance will report the error. Raises Unsupported
    for a schema that becomes too large, for a recursive `not`, and for references in a circle.
    """
    rewriter = _Rewriter(json.loads(text))
    try:
        schema = rewriter.schema(rewriter.root, "#")
    except Unsupported:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError):
        return text, ()
    return json.dumps(schema, ensure_ascii=False), tuple(rewriter.warnings)


class _Rewriter:
    """Rewrites one schema, `root`."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.warnings: dict[str, None] = {}  # in order, without duplicates
        self._negation = Negation(root)
        self._num_nodes = 0
        self._checked: set[int] = set()  # see schema_facts.check_references
        self._steps: tuple[tuple[str, Callable[[dict, str, list], None]], ...] = (
            ("allOf", self._merge_conditions),
            ("if", self._if),
            ("not", self._negated),
            ("dependentRequired", self._dependents),
            ("dependentSchemas", self._dependents),
            ("dependencies", self._dependents),
            ("propertyNames", self._property_names),
            ("oneOf", self._one_of),
            ("contains", self._contains),
            ("uniqueItems", self._unique_items),
            ("unevaluatedProperties", self._unevaluated_properties),
            ("unevaluatedItems", self._unevaluated_items),
            ("minProperties", self._min_properties),
            ("maxProperties", self._max_properties),
        )

    def schema(self, schema: Schema, path: str) -> Schema:
        """Return a rewritten schema. `path`: its position in the original."""
        if not isinstance(schema, dict):
            return schema
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise Unsupported(f"rewriting it takes more than {MAX_NODES} schemas")
        if "$ref" in schema:
            schema_facts.check_references(schema, self.root, self._checked)
        schema = dict(schema)
        extras: list[Schema] = []  # schemas to intersect with
        for keyword, step in self._steps:
            if keyword not in schema:
                continue
            try:
                step(schema, path, extras)
            except (Unsupported, UnsupportedPattern) as error:
                if isinstance(error, schema_facts.Recursive):
                    raise
                schema.pop(keyword, None)
                self._warn(path, keyword, str(error))
        if False in extras:
            return False
        self._add(schema, path, extras)
        for keyword in SCHEMAS_BY_NAME:
            if isinstance(schema.get(keyword), dict):
                schema[keyword] = {
                    name: self.schema(each, f"{path}/{keyword}/{name}")
                    for name, each in schema[keyword].items()
                }
        for keyword in dict.fromkeys((*SCHEMAS, *LISTS)):  # "items" may be a schema or a list
            value = schema.get(keyword)
            if isinstance(value, dict) and keyword in SCHEMAS:
                schema[keyword] = self.schema(value, f"{path}/{keyword}")
            elif isinstance(value, list) and keyword in LISTS:
                schema[keyword] = [
                    self.schema(each, f"{path}/{keyword}/{index}")
                    for index, each in enumerate(value)
                ]
        rewrite_texts_(schema, lambda keyword, reason: self._warn(path, keyword, reason))
        bound_numbers_(schema)
        return schema

    def _add(self, schema: dict, path: str, extras: list[Schema]) -> None:
        """Intersect a schema with others, as long as there are not too many combinations."""
        extras = [each for each in extras if each not in (True, {})]
        if not extras:
            return
        num_choices, kept = 1, []
        for each in extras:
            num_choices *= len(each["anyOf"]) if isinstance(each, dict) and "anyOf" in each else 1
            if num_choices > MAX_CHOICES:
                self._warn(path, "a condition", "too many combinations")
                break
            kept.append(each)
        schema["allOf"] = [*schema.get("allOf", ()), *kept]

    def _warn(self, path: str, keyword: str, reason: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings[f"{keyword} at {path} is not enforced ({reason})"] = None

    # conditions

    def _if(self, schema: dict, path: str, extras: list[Schema]) -> None:
        names = ("if", "then", "else")
        self._condition({name: schema.pop(name, True) for name in names}, schema, extras)

    def _condition(self, stated: dict, base: dict, extras: list[Schema]) -> None:
        """Append to `extras` an `if` condition on values of `base`, as alternatives."""
        condition, then = stated.get("if", True), stated.get("then", True)
        otherwise = stated.get("else", True)
        if then is True and otherwise is True:
            return
        negated = self._negation.of(condition, base)
        branches = [_all(condition, then), _all(negated, otherwise)]
        extras.append({"anyOf": [each for each in branches if each is not False]})

    def _merge_conditions(self, schema: dict, path: str, extras: list[Schema]) -> None:
        """Merge n conditions on the same property into one choice, instead of 2^n combinations."""
        parts = schema["allOf"]
        if not isinstance(parts, list):
            raise Unsupported("no list")
        by_name: dict[str, list[tuple[list, dict]]] = {}
        for part in parts:
            name, values = _discriminator(part)
            if name is not None:
                by_name.setdefault(name, []).append((values, part))
        for name, cases in by_name.items():
            choice = self._choice(name, cases, schema)
            if choice is not None:
                extras.append(choice)
                parts = [part for part in parts if all(part is not case for _, case in cases)]
        kept = []
        for part in parts:
            is_condition = isinstance(part, dict) and part.keys() <= {"if", "then", "else"}
            try:
                # These choices multiply with the choices of other conditions.
                self._condition(part if is_condition and "if" in part else {}, schema, extras)
            except Unsupported:
                is_condition = False  # rewriting the part itself will add the warning
            if not is_condition:
                kept.append(part)
        schema["allOf"] = kept
        if not kept:
            del schema["allOf"]

    def _choice(self, name: str, cases: list[tuple[list, dict]], base: dict) -> Schema | None:
        """Return conditions on one property as alternatives; None if that is impossible."""
        known = [value for values, _ in cases for value in values]
        if len(cases) < 2 or len(known) != len({json.dumps(each) for each in known}):
            return None
        # Conditions that do not require the property are true if it is absent.
        of_absent = [
            part["then"] for _, part in cases if name not in part["if"].get("required", ())
        ]
        others = {"properties": {name: {"enum": known}}}
        if not of_absent:
            others["required"] = [name]
        branches = [
            _all({"properties": {name: {"enum": values}}, "required": [name]}, part["then"])
            for values, part in cases
        ]
        if of_absent:
            branches.append(_all({"properties": {name: False}}, *of_absent))
        try:
            branches.append(self._negation.of(others, base))
        except Unsupported:
            return None
        return {"anyOf": [each for each in branches if each is not False]}

    def _negated(self, schema: dict, path: str, extras: list[Schema]) -> None:
        extras.append(self._negation.of(schema.pop("not"), schema))

    def _dependents(self, schema: dict, path: str, extras: list[Schema]) -> None:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needs in (schema.pop(keyword, None) or {}).items():
                needs = {"required": needs} if isinstance(needs, list) else needs
                if name in schema.get("required", ()):
                    extras.append(needs)
                else:
                    there = _all({"required": [name]}, needs) if needs is not False else False
                    branches = [{"properties": {name: False}}, there]
                    extras.append({"anyOf": [each for each in branches if each is not False]})

    def _one_of(self, schema: dict, path: str, extras: list[Schema]) -> None:
        branches = schema.pop("oneOf")
        if not are_disjoint(branches, self.root):
            self._warn(path, "oneOf", "more than one of its schemas may match")
        if "anyOf" in schema:
            extras.append({"anyOf": branches})
        else:
            schema["anyOf"] = branches

    # objects

    def _property_names(self, schema: dict, path: str, extras: list[Schema]) -> None:
        names = schema_facts.resolved(schema["propertyNames"], self.root)
        named = dict(schema.get("properties") or {})
        by_pattern = dict(schema.get("patternProperties") or {})
        additional = schema.get("additionalProperties", True)
        values = finite_values(names, self.root)
        if values is not None:
            allowed = [each for each in values if isinstance(each, str)]
            if by_pattern:
                raise Unsupported("next to patternProperties")
            named = {name: named.get(name, additional) for name in allowed}
            schema["additionalProperties"] = False
        else:
            patterns = tuple(patterns_of(names))
            known = (literals(list(named)),) if named else ()
            found = {rewrite((*patterns, each)): by_pattern[each] for each in by_pattern}
            if additional is not False:
                found[rewrite(patterns, (*by_pattern, *known))] = additional
            named = {
                name: each
                for name, each in named.items()
                if all(re.search(pattern, name) for pattern in patterns)
            }
            schema["patternProperties"], schema["additionalProperties"] = found, False
        schema["properties"] = named
        del schema["propertyNames"]
        missing = [
            name
            for name in schema.get("required", ())
            if name not in named
            and not any(
                re.search(in_python(each), name) for each in schema.get("patternProperties", ())
            )
        ]
        if missing:
            extras.append(False)
        if not named:
            del schema["properties"]

    def _min_properties(self, schema: dict, path: str, extras: list[Schema]) -> None:
        least, optional = schema["minProperties"], _optional(schema)
        needed = least - len(set(schema.get("required", ())))
        if needed <= 0 or not optional:
            is_free = schema.get("additionalProperties", True) is not False
            if needed <= 0:
                del schema["minProperties"]
            elif needed > 1 and is_free:
                self._warn(path, "minProperties", "a duplicate key may count twice")
            return
        _check_count(math.comb(len(optional), needed))
        del schema["minProperties"]
        choices = [{"required": [*each]} for each in combinations(optional, needed)]
        extras.append({"anyOf": choices} if choices else False)

    def _max_properties(self, schema: dict, path: str, extras: list[Schema]) -> None:
        most, optional = schema["maxProperties"], _optional(schema)
        required = set(schema.get("required", ()))
        if not optional:
            return
        left = most - len(required)
        schema["properties"] = schema["properties"] | {
            name: _unnamed(schema, name) for name in required - schema["properties"].keys()
        }
        del schema["maxProperties"]
        schema["additionalProperties"] = False
        schema.pop("patternProperties", None)
        if left < 0:
            extras.append(False)
        elif left < len(optional):
            num_gone = len(optional) - left
            _check_count(math.comb(len(optional), num_gone))
            extras.append(
                {
                    "anyOf": [
                        {"properties": dict.fromkeys(gone, False)}
                        for gone in combinations(optional, num_gone)
                    ]
                }
            )

    def _unevaluated_properties(self, schema: dict, path: str, extras: list[Schema]) -> None:
        value = schema.pop("unevaluatedProperties")
        if value in (True, {}):
            return
        parts = [schema_facts.resolved(part, self.root) for part in schema.get("allOf", ())]
        own = [schema, *parts]
        if "$ref" in schema:
            own.append(schema_facts.resolved(schema, self.root))
        names: dict[str, Schema] = {}
        for part in own:
            for keyword in ("patternProperties", "additionalProperties", "if", "dependentSchemas"):
                if isinstance(part, dict) and part.get(keyword):
                    raise Unsupported(f"next to {keyword}")
            names |= dict.fromkeys(part.get("properties") or {}, True) if part else {}
        choices = schema.get("anyOf")
        if choices is None:
            schema["properties"] = names | (schema.get("properties") or {})
            schema["additionalProperties"] = value
            return
        closed = []
        for choice in choices:
            choice = schema_facts.resolved(choice, self.root)
            known = names | (choice.get("properties") or {})
            closed.append(choice | {"properties": known, "additionalProperties": value})
        schema["anyOf"] = closed

    # arrays

    def _unevaluated_items(self, schema: dict, path: str, extras: list[Schema]) -> None:
        value = schema.pop("unevaluatedItems")
        if "items" in schema or value in (True, {}):
            return
        for keyword in ("anyOf", "allOf", "if", "contains", "$ref"):
            if keyword in schema:
                raise Unsupported(f"next to {keyword}")
        schema["items"] = value

    def _contains(self, schema: dict, path: str, extras: list[Schema]) -> None:
        wanted, least = schema["contains"], schema.pop("minContains", 1)
        most, items = schema.pop("maxContains", None), schema.get("items", True)
        if "prefixItems" in schema or isinstance(items, list):
            raise Unsupported("next to prefixItems")
        hit, other = _all(items, wanted), items
        if most is not None:
            other = _all(items, self._negation.of(wanted, items if isinstance(items, dict) else {}))
        longest = min(schema.get("maxItems", math.inf), max(least, most or 0) + 4)
        branches: list[Schema] = []
        for count in range(least, (least if most is None else most) + 1):
            if not count:
                branches.append({"type": "array", "items": other})
            for length in range(count, longest + 1) if count else ():
                for before in combinations(range(length - 1), count - 1):
                    hits = {*before, length - 1}
                    prefix = [hit if index in hits else other for index in range(length)]
                    form = {"type": "array", "prefixItems": prefix, "items": other}
                    branches.append(form | {"minItems": max(length, schema.get("minItems", 0))})
                _check_count(len(branches))
        del schema["contains"]
        schema.pop("items", None)
        schema["type"] = "array"
        extras.append({"anyOf": branches} if branches else False)

    def _unique_items(self, schema: dict, path: str, extras: list[Schema]) -> None:
        if not schema.pop("uniqueItems"):
            return
        if schema.get("maxItems", 2) < 2:
            return
        items = schema.get("items", True)
        values = finite_values(items, self.root)
        if values is None or "prefixItems" in schema or "contains" in schema:
            raise Unsupported("its items are not a few known values")
        values = schema_facts.distinct(values)
        most = min(schema.pop("maxItems", len(values)), len(values))
        least = schema.pop("minItems", 0)
        if least > most:
            extras.append(False)
            return
        if math.perm(len(values), most) > MAX_BRANCHES:
            schema["maxItems"] = most
            schema["minItems"] = least
            raise Unsupported(f"more than {MAX_BRANCHES} orders of its items")
        del schema["items"]
        schema["type"] = "array"
        form = {"type": "array", "items": False, "minItems": least}
        extras.append(
            {
                "anyOf": [
                    form | {"prefixItems": [{"const": value} for value in order]}
                    for order in permutations(values, most)
                ]
            }
        )


def _all(*schemas: Schema) -> Schema:
    """Return the intersection of schemas."""
    if any(each is False for each in schemas):
        return False
    parts = [each for each in schemas if each not in (True, {})]
    if len(parts) < 2:
        return parts[0] if parts else True
    return {"allOf": parts}


def _check_count(count: int) -> None:
    if count > MAX_BRANCHES:
        raise Unsupported(f"more than {MAX_BRANCHES} alternatives")


def _optional(schema: dict) -> list[str]:
    """Return the names of an object's optional properties."""
    required = schema.get("required", ())
    named = schema.get("properties") or {}
    return [name for name, each in named.items() if name not in required and each is not False]


def _unnamed(schema: dict, name: str) -> Schema:
    """Return the schema of a property that is not among the `properties` of its object."""
    patterns = schema.get("patternProperties") or {}
    found = [each for pattern, each in patterns.items() if re.search(in_python(pattern), name)]
    return _all(*found) if found else schema.get("additionalProperties", True)


def _discriminator(part: Schema) -> tuple[str | None, list]:
    """Return the property that a condition tests, and the values; (None, []) if it tests more."""
    if not isinstance(part, dict) or {"if", "then"} != part.keys() or part["then"] is False:
        return None, []
    condition = part["if"]
    if not isinstance(condition, dict) or not condition.keys() <= {
        "properties",
        "required",
        "type",
    }:
        return None, []
    properties = condition.get("properties")
    if not isinstance(properties, dict) or len(properties) != 1:
        return None, []
    ((name, form),) = properties.items()
    if not {*condition.get("required", ())} <= {name} or not isinstance(form, dict):
        return None, []
    if form.keys() - {"const", "enum", "type"}:
        return None, []
    values = [form["const"]] if "const" in form else form.get("enum")
    return (name, values) if isinstance(values, list) else (None, [])
