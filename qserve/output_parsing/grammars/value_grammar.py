"""ValueGrammar: Lark of a schema's values in a notation other than JSON.

A schema with only types, properties, items, constants, alternatives and references gets a grammar
in the notation. Any other schema gets a JSON grammar; the readers of these notations accept JSON.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qserve.output_parsing.grammars.call_schema import moved_references
from qserve.output_parsing.grammars.text_grammar import ANNOTATIONS, Inexpressible
from qserve.output_parsing.notations.argument_schema import ArgumentSchema
from qserve.structured.lark_text import quoted
from qserve.structured.schema_facts import Unsupported, are_disjoint, lookup, own_values

if TYPE_CHECKING:
    from qserve.output_parsing.grammars.call_grammar import CallGrammar

Schema = Mapping[str, Any]
ROOT = "#/$defs/root"
NUMBERS = {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
TEXTS = {"type", "pattern", "format", "minLength", "maxLength"}
LISTS = {"type", "items", "minItems", "maxItems"}
OBJECTS = {"type", "properties", "required", "additionalProperties"}
MAX_ITEMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """How a format writes values."""

    null: str = "null"
    true: str = "true"
    false: str = "false"
    comma: str = ", "
    key: Callable[["CallGrammar", str], str]  # returns Lark of a key with its separator
    text: Callable[["CallGrammar", Schema], str]  # returns Lark of strings that fit a schema
    constant: Callable[["CallGrammar", str], str]  # returns Lark of one string


class ValueGrammar:
    """Defines the rules for one tool's values in a CallGrammar."""

    def __init__(self, form: "CallGrammar", notation: Notation, root: Schema, prefix: str) -> None:
        self._form, self._notation, self._root, self._prefix = form, notation, root, prefix
        self._num_rules = 0
        self._names: dict[int, str] = {}  # id() of a reference's target -> name of its rule

    def value(self, schema: Any) -> str:
        """Return Lark of a value in the notation, or else as JSON."""
        try:
            return self._value(schema)
        except Inexpressible:
            return f"({self.as_json(schema)})"

    def as_json(self, schema: Any) -> str:
        """Return Lark of a value as JSON."""
        moved = moved_references(schema, ROOT)
        if not isinstance(moved, Mapping):
            return self._form.as_json(moved)
        defs = {"$defs": {"root": moved_references(self._root, ROOT)}}
        return self._form.as_json(defs | {"allOf": [moved]} if _refers(moved) else moved)

    def fields(
        self, keys: Sequence[str], required: Sequence[str], rule: str, field: Callable[[str], str]
    ) -> str:
        """Return Lark of fields in order, separated by commas; optional fields may be absent."""
        rules, name = self._form.rules, f"{self._prefix}_{rule}"
        comma = quoted(self._notation.comma)
        for place, key in enumerate(keys):
            rules[f"{name}_{place}"] = field(key)
            first = f"{name}_{place} {name}_more_{place + 1}"
            more = f"{comma} {name}_{place}"
            if key not in required:
                first, more = f"{first} | {name}_first_{place + 1}", f"({more})?"
            rules[f"{name}_first_{place}"] = first
            rules[f"{name}_more_{place}"] = f"{more} {name}_more_{place + 1}"
        rules[f"{name}_first_{len(keys)}"] = rules[f"{name}_more_{len(keys)}"] = '""'
        return f"{name}_first_0"

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            raise Inexpressible("no type")
        own = schema.keys() - ANNOTATIONS
        if own == {"$ref"}:
            return self._referred(schema["$ref"])
        for word in ("anyOf", "oneOf", "allOf"):
            if own == {word} and isinstance(schema[word], list) and schema[word]:
                return self._alternatives(word, schema[word])
        if "enum" in own or "const" in own:
            if not own <= {"type", "enum", "const"} or {"enum", "const"} <= own:
                raise Inexpressible("constants with other keywords")
            return self._constants(schema)
        types = schema.get("type")
        types = types if isinstance(types, list) else [types]
        found = [self._of_type(kind, schema, own) for kind in types]
        return f"({' | '.join(found)})"

    def _of_type(self, kind: Any, schema: Schema, own: set[str]) -> str:
        notation = self._notation
        is_alone = not isinstance(schema["type"], list) if "type" in schema else True
        allowed = {"null": {"type"}, "boolean": {"type"}, "integer": NUMBERS, "number": NUMBERS}
        allowed |= {"string": TEXTS, "array": LISTS, "object": OBJECTS}
        if kind not in allowed or (is_alone and not own <= allowed[kind]):
            raise Inexpressible("keywords of other types")
        if not own <= set().union(*allowed.values()):
            raise Inexpressible("other keywords")
        part = {key: value for key, value in schema.items() if key in allowed[kind]}
        part["type"] = kind
        if kind == "null":
            return quoted(notation.null)
        if kind == "boolean":
            return f"({quoted(notation.true)} | {quoted(notation.false)})"
        if kind in ("integer", "number"):
            return self._form.as_json(part)
        if kind == "string":
            return notation.text(self._form, part)
        return self._list(part) if kind == "array" else self._object(part)

    def _referred(self, reference: Any) -> str:
        target = target_of(self._root, reference)
        if not isinstance(target, Mapping):
            raise Inexpressible("a reference without a target")
        if id(target) not in self._names:
            name = self._names[id(target)] = f"{self._prefix}_ref_{len(self._names)}"
            try:
                self._form.rules[name] = self._value(target)
            except Inexpressible:
                self._form.rules[name] = self.as_json({"$ref": reference})
        return self._names[id(target)]

    def _alternatives(self, word: str, branches: list[Any]) -> str:
        if word == "allOf" and len(branches) > 1:
            raise Inexpressible("allOf")
        if word == "oneOf" and not are_disjoint(branches, self._root):
            raise Inexpressible("oneOf")
        # llguidance's lexer is greedy: it cannot choose between two alternatives that are strings.
        kinds = ArgumentSchema(self._root)
        if sum("string" in kinds.kinds([each]) for each in branches) > 1:
            raise Inexpressible("several texts")
        return f"({' | '.join(self._value(each) for each in branches)})"

    def _constants(self, schema: Schema) -> str:
        types = ArgumentSchema(schema)
        values = [each for each in own_values(schema) or () if types.allows([schema], each)]
        if not values:
            raise Inexpressible("no constant")
        return f"({' | '.join(map(self._constant, values))})"

    def _constant(self, value: Any) -> str:
        notation = self._notation
        if isinstance(value, str):
            return notation.constant(self._form, value)
        if isinstance(value, bool) or value is None:
            words = {None: notation.null, True: notation.true, False: notation.false}
            return quoted(words[value])
        if isinstance(value, int):
            return quoted(json.dumps(value))
        raise Inexpressible("a constant")

    def _list(self, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(schema.get("items"), Mapping) or max(least, most or 0) > MAX_ITEMS:
            raise Inexpressible("items")
        if most is not None and most < max(least, 1):
            if least:
                raise Inexpressible("no number of items")
            return quoted("[]")
        name = f"{self._prefix}_item_{self._new()}"
        self._form.rules[name] = self._value(schema["items"])
        more = f"({quoted(self._notation.comma)} {name})"
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{name} {more}{'*' if times == '{0,}' else times}"
        return f"({quoted('[')} {f'({items})' + ('' if least else '?')} {quoted(']')})"

    def _object(self, schema: Schema) -> str:
        keys, required = plain_object(schema)
        properties = schema.get("properties") or {}
        rule = f"object_{self._new()}"

        def field(key: str) -> str:
            return f"{self._notation.key(self._form, key)} {self.value(properties[key])}"

        fields = self.fields(keys, required, rule, field)
        return f"({quoted('{')} {fields} {quoted('}')})"

    def _new(self) -> int:
        """Return a number for a new rule's name."""
        self._num_rules += 1
        return self._num_rules


def target_of(root: Schema, reference: Any) -> Any:
    """Return the schema that a local reference points to. Raises Inexpressible."""
    try:
        return lookup(reference, root)
    except Unsupported as error:
        raise Inexpressible(str(error)) from None


def resolved_root(schema: Schema) -> Schema:
    """Return the target of the reference if a root schema is only a reference, else the root."""
    if schema.keys() - ANNOTATIONS == {"$ref"}:
        target = target_of(schema, schema["$ref"])
        if isinstance(target, Mapping):
            return target
    return schema


def plain_object(schema: Schema) -> tuple[list[str], list[str]]:
    """Return the names of an object's properties, and of the required ones.

    Raises Inexpressible unless the schema only lists properties. The grammar will have them in this
    order, and no other properties.
    """
    own = schema.keys() - ANNOTATIONS
    properties, required = schema.get("properties"), schema.get("required", [])
    if not own <= OBJECTS | {"strict"} or schema.get("type", "object") != "object":
        raise Inexpressible(f"{min(own - OBJECTS, default='type')} of an object")
    if not isinstance(properties, Mapping):
        if schema.get("additionalProperties") is not False:
            raise Inexpressible("an object without properties")
        properties = {}
    if not isinstance(required, list) or not set(required) <= properties.keys():
        raise Inexpressible("required properties without a schema")
    keys = [key for key in properties if properties[key] is not False]
    if not set(required) <= set(keys):
        raise Inexpressible("a required property that nothing fits")
    return keys, required


def _refers(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_refers, value))
    return isinstance(value, Mapping) and ("$ref" in value or any(map(_refers, value.values())))
