"""Lark of one call, per notation of arguments: JSON, tags, Python literals, Gemma's braces.

The functions take the CallGrammar, and index, name and schema of the tool. They return Lark.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qserve.output_parsing.grammars.call_grammar import CallGrammar, Schema
from qserve.output_parsing.grammars.call_schema import call_schema, list_schema
from qserve.output_parsing.grammars.text_grammar import (
    ANNOTATIONS,
    Inexpressible,
    all_of,
    as_text,
    escaped,
    may_be_empty,
    text_expressions,
    without,
)
from qserve.output_parsing.grammars.value_grammar import (
    Notation,
    ValueGrammar,
    plain_object,
    resolved_root,
    target_of,
)
from qserve.output_parsing.notations.argument_schema import ArgumentSchema
from qserve.output_parsing.notations.bare_value import typed
from qserve.structured.lark_text import quoted

if TYPE_CHECKING:
    from qserve.output_parsing.notations.tagged_calls import Tags

Rule = Callable[[CallGrammar, int, str, Schema], str]

# Characters that need no escape in a text between single quotes.
UNQUOTED = r"/[^'\\\n\r]*/"
MAX_NESTED = 200  # rules for values inside of other values; a schema may contain itself
OF_ARRAYS = {"type", "items", "minItems", "maxItems"}
OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
ITEM = "item"  # MiniMax-M3's tag of an array's elements
PLAIN_KEY = re.compile(r"[A-Za-z_][\w.-]*")  # may be the name of a tag
FREE_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
# JSON type -> expression of texts that cannot be read as a value of this type.
OTHERS = {
    "null": r"~/(?i)\s*(null|none)\s*/",
    "boolean": r"~/(?i)\s*(true|false)\s*/",
    "number": r"~/\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*/",
    "object": r"~/\s*\{(?s:.*)/",
    "array": r"~/\s*[\[(](?s:.*)/",
}


def arguments(form: CallGrammar, index: int, name: str, schema: Schema) -> str:
    """Return Lark of the arguments as a JSON object."""
    return form.as_json(schema)


def named_object(form: CallGrammar, index: int, name: str, schema: Schema) -> str:
    """Return Lark of {"name": ..., "arguments": {...}}."""
    opening = f'{{"name": {json.dumps(name)}, "arguments": '
    return f"{quoted(opening)} {form.as_json(schema)} {quoted('}')}"


def cohere(form: CallGrammar, index: int, name: str, schema: Schema) -> str:
    """Return Lark of {"tool_call_id": "0", "tool_name": ..., "parameters": {...}}."""
    form.rules["CALL_NUMBER"] = "/[0-9]{1,2}/"
    before = f'", "tool_name": {json.dumps(name)}, "parameters": '
    parts = (quoted('{"tool_call_id": "'), "CALL_NUMBER", quoted(before), form.as_json(schema))
    return f"{' '.join(parts)} {quoted('}')}"


def bare_object(form: CallGrammar, index: int, name: str, schema: Schema) -> str:
    """Return Lark of {"name": ..., "parameters": {...}}.

    One JSON rule covers the whole call: llguidance cannot choose between a JSON rule and a text
    that start alike.
    """
    return form.as_json(call_schema({name: schema}, "parameters"))


def bare_list(form: CallGrammar) -> str:
    """Return Lark of [{"name": ..., "arguments": {...}}, ...], as one JSON rule."""
    return form.as_json(list_schema(form.tools, "arguments", is_single=form.is_single))


def mistral(form: CallGrammar) -> str:
    """Return Lark of Mistral's calls: a list, or with newer tokenizers a marker per call."""
    start = form.text("[TOOL_CALLS]")
    if form.marker_token("[ARGS]") is None:
        return f"{start} {quoted(' ')}? {bare_list(form)}"

    def body(index: int, name: str, schema: Schema) -> str:
        return f"{start} {quoted(name)} {form.text('[ARGS]')} {form.as_json(schema)}"

    return f"{form.each(body)}{'' if form.is_single else '+'}"


def tagged(tags: "Tags") -> Rule:
    """Return the function for calls with tags around bare text."""
    return lambda form, index, name, schema: _Tagged(tags, form, index, name, schema).rule()


class _Tagged:
    """Defines the rules of one tool's arguments in tags."""

    def __init__(
        self, tags: "Tags", form: CallGrammar, index: int, name: str, schema: Schema
    ) -> None:
        self._tags, self._form, self._index, self._name = tags, form, index, name
        self._root, self._schema = schema, ArgumentSchema(schema)
        line = "\n" * tags.trims
        self._end = f"{line}{tags.value_end}" + "\n" * tags.is_spaced
        self._key_end = f"{tags.key_end or '>'}{line}"
        if tags.value:
            self._key_end = f"{tags.key_end}{chr(10) * tags.is_spaced}{tags.value}"
        # Readers accept an end tag with the argument's name, so values must not contain one.
        names = "|".join(map(escaped, self._schema.keys))
        self._reserved = tags.reserved
        self._closed = [rf"<\/({names})[^A-Za-z0-9_]"] if names else []
        self._values = ValueGrammar(form, JSON_NOTATION, schema, f"v_{index}")

    def rule(self) -> str:
        tags, form = self._tags, self._form
        line = "\n" * tags.is_spaced
        name_end = ">" if tags.function else ""
        opening = form.text(f"{tags.quote}{self._name}{tags.quote}{name_end}{line}")
        if self._name in form.free:
            return f"{opening} {self._free()}*"
        keys, required = plain_object(resolved_root(self._root))
        parts = [opening]
        for place, key in enumerate(keys):
            if not key.strip() == key or any(char in key for char in "<>\"'\n"):
                raise Inexpressible(f"a property named {key!r:.40}")
            rule = f"arg_{self._index}_{place}"
            form.rules[rule] = self._argument(key)
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _argument(self, key: str) -> str:
        """Return Lark of one argument with its tags."""
        schemas = self._schema.of(key)
        if len(schemas) != 1:
            raise Inexpressible(f"several schemas of {key!r:.40}")
        texts = _Texts()
        values: list[str] = []  # Lark of values that are written as JSON
        self._collect(key, schemas[0], texts, values)
        if not self._tags.has_types and texts.expressions:
            texts.expressions += texts.scalars
            texts.scalars = []
        found = []
        if texts.expressions:
            union = " | ".join(f"({each})" for each in texts.expressions)
            rule = self._form.ended(union, self._end, is_empty=texts.may_be_empty)
            found.append(f"{self._before(key, True)} {rule}")
        for each in texts.scalars:
            values.append(self._form.terminal(each))
        for each in values:
            found.append(f"{self._before(key, False)} {each} {self._form.text(self._end)}")
        if not found:
            raise Inexpressible(f"no value of {key!r:.40}")
        return " | ".join(found)

    def _before(self, key: str, is_string: bool) -> str:
        """Return Lark of the text before a value."""
        typing = (' string="true"' if is_string else ' string="false"') * self._tags.has_types
        quote = self._tags.quote
        return self._form.text(f"{self._tags.parameter}{quote}{key}{quote}{typing}{self._key_end}")

    def _collect(self, key: str, schema: Any, texts: "_Texts", values: list[str]) -> None:
        """Collect what a schema allows: expressions of texts and scalars, Lark of other values.

        llguidance's lexer is greedy, so texts and scalars must become one terminal.
        """
        if not isinstance(schema, Mapping) or not schema.keys() - ANNOTATIONS:
            self._add_text({}, (), texts)
            return
        own = schema.keys() - ANNOTATIONS
        if own == {"$ref"}:
            self._collect(key, target_of(self._root, schema["$ref"]), texts, values)
        elif own == {"anyOf"} and isinstance(schema["anyOf"], list):
            for each in schema["anyOf"]:
                self._collect(key, each, texts, values)
        elif own & {"enum", "const"} and own <= {"enum", "const", "type"}:
            self._add_constants(key, schema, texts)
        else:
            self._add_types(key, schema, texts, values)

    def _add_types(self, key: str, schema: Schema, texts: "_Texts", values: list[str]) -> None:
        own = schema.keys() - ANNOTATIONS
        every = self._schema.kinds(self._schema.of(key))
        kinds = self._schema.kinds([schema])
        others = sorted(kinds - {"string"} - ({"integer"} if "number" in kinds else set()))
        if "string" in kinds:
            if "type" not in schema or not own <= WITH_TYPES:
                raise Inexpressible("other keywords of a text")
            of_text = {name: schema[name] for name in TEXTS if name in schema} if others else schema
            excluded = [
                OTHERS["number" if kind == "integer" else kind]
                for kind in every
                if kind in OTHERS or kind == "integer"
            ]
            self._add_text(of_text, excluded, texts)
        scalars = [kind for kind in others if kind in SCALARS] if "string" in every else []
        if scalars and own & LIMITS:
            raise Inexpressible("limits of a number that may be a text")
        texts.scalars += [SCALARS[kind] for kind in scalars]
        others = [kind for kind in others if kind not in scalars]
        if others:
            part = schema if kinds == {*others} else {**schema, "type": others}
            values.append(self._values.as_json(part))

    def _add_text(self, schema: Schema, excluded: Sequence[str], texts: "_Texts") -> None:
        own = [*text_expressions(schema), *sorted({*excluded})]
        texts.expressions.append(all_of([*own, *without(self._reserved, self._closed)]))
        texts.may_be_empty |= may_be_empty(schema)

    def _add_constants(self, key: str, schema: Schema, texts: "_Texts") -> None:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        for value in values if isinstance(values, list) else ():
            text = as_text(value)
            is_safe = not any(each in text for each in self._reserved)
            is_read = json.loads(typed(text, self._schema, key)) == value
            if not (is_safe and is_read and self._schema.allows([schema], value)):
                continue
            texts.may_be_empty |= not text
            found = texts.expressions if isinstance(value, str) else texts.scalars
            found.append(f"/{escaped(text)}/" if text else "/(?s:.{0,0})/")

    def _free(self) -> str:
        """Return Lark of an argument with any name and any text."""
        key = self._form.terminal(FREE_KEY)
        typing = ' string="true"' * self._tags.has_types
        before = self._form.text(f"{self._tags.parameter}{self._tags.quote}")
        after = self._form.text(f"{self._tags.quote}{typing}{self._key_end}")
        text = all_of(without(self._reserved))
        value = self._form.ended(text, self._end, is_empty=True)
        self._form.rules["other"] = f"{before} {key} {after} {value}"
        return "other"


def named_tags(tags: "Tags") -> Rule:
    """Return the function for calls whose tags have the names of arguments (MiniMax-M3)."""
    return lambda form, index, name, schema: _NamedTags(tags, form, index, name, schema).rule()


class _NamedTags(_Tagged):
    """Defines the rules of one tool's arguments, each in tags with its name."""

    def __init__(
        self, tags: "Tags", form: CallGrammar, index: int, name: str, schema: Schema
    ) -> None:
        super().__init__(tags, form, index, name, schema)
        self._reserved, self._closed = (tags.value_end,), []
        self._num_nested = 0

    def _argument(self, key: str) -> str:
        schemas = self._schema.of(key)
        if len(schemas) != 1:
            raise Inexpressible(f"several schemas of {key!r:.40}")
        return self._element(key, schemas[0])

    def _element(self, key: str, schema: Any) -> str:
        """Return Lark of a value between tags with a name."""
        if not PLAIN_KEY.fullmatch(key):
            raise Inexpressible(f"a property named {key!r:.40}")
        end, texts = f"{self._tags.value_end}</{key}>", _Texts()
        values: list[str] = []
        self._collect(key, schema, texts, values)
        before, after = self._before(key, True), self._form.text(end)
        found = [f"{before} {each} {after}" for each in values]
        expressions = [*texts.expressions, *texts.scalars]
        if expressions:
            union = " | ".join(f"({each})" for each in expressions)
            found.append(f"{before} {self._form.ended(union, end, is_empty=texts.may_be_empty)}")
        if not found:
            raise Inexpressible(f"no value of {key!r:.40}")
        return " | ".join(found)

    def _add_types(self, key: str, schema: Schema, texts: "_Texts", values: list[str]) -> None:
        """Collect arrays and objects as tags, where their schema has no other keywords."""
        own, kinds = schema.keys() - ANNOTATIONS, self._schema.kinds([schema])
        items, properties = schema.get("items"), schema.get("properties")
        if kinds == {"array"} and own <= OF_ARRAYS and items:
            least, most = schema.get("minItems", 0), schema.get("maxItems", "")
            values.append(f"{self._nested(ITEM, items)}{{{least},{most}}}")
        elif kinds == {"object"} and own <= OF_OBJECTS and properties:
            keys, required = plain_object(schema)
            values.append(
                " ".join(
                    self._nested(each, properties[each]) + "?" * (each not in required)
                    for each in keys
                )
            )
        else:
            super()._add_types(key, schema, texts, values)

    def _nested(self, key: str, schema: Any) -> str:
        """Define a rule for a value inside of another one. Returns its name."""
        self._num_nested += 1
        if self._num_nested > MAX_NESTED:
            raise Inexpressible("many nested values")
        name = f"nested_{self._index}_{self._num_nested}"
        self._form.rules[name] = self._element(key, schema)
        return name

    def _before(self, key: str, is_string: bool) -> str:
        return self._form.text(f"{self._tags.parameter}{key}>")

    def _free(self) -> str:
        """Return Lark of an argument with any name, and any text or tags.

        Names of end tags are not compared with those of the tags that they end.
        """
        form, key = self._form, self._form.terminal(FREE_KEY)
        start, end = form.text(self._tags.parameter), f"{self._tags.value_end}</"
        text = form.ended(all_of(without(self._reserved)), end, is_empty=True)
        value = f"(other+ {form.text(end)} | {text})"
        form.rules["other"] = f"{start} {key} {form.text('>')} {value} {key} {form.text('>')}"
        return "other"


@dataclass(slots=True)
class _Texts:
    """Expressions of values in bare text: strings, and scalars of other types."""

    expressions: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    may_be_empty: bool = False


# Expressions of scalars, for arguments that may also be strings.
SCALARS = {
    "null": "/null/",
    "boolean": "/true|false/",
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,9})?/",
}
TEXTS = ("type", "pattern", "format", "minLength", "maxLength")
LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
WITH_TYPES = frozenset(
    ("type", "pattern", "format", "minLength", "maxLength", "minimum", "maximum")
    + ("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "minItems", "maxItems")
    + ("properties", "required", "additionalProperties")
)


def _json_text(form: CallGrammar, schema: Schema) -> str:
    return form.as_json(schema)


def _json_constant(form: CallGrammar, value: str) -> str:
    return quoted(json.dumps(value, ensure_ascii=False))


JSON_NOTATION = Notation(
    key=lambda form, key: quoted(f"{json.dumps(key, ensure_ascii=False)}: "),
    text=_json_text,
    constant=_json_constant,
)


def _python_text(form: CallGrammar, schema: Schema) -> str:
    """Return Lark of a string in double quotes, as in JSON, or in single quotes."""
    try:
        inside = all_of([*text_expressions(schema), UNQUOTED])
    except Inexpressible:
        return f"({form.as_json(schema)})"
    single = form.terminal(f"{quoted(chr(39))} ({inside}) {quoted(chr(39))}")
    return f"({form.as_json(schema)} | {single})"


def _python_constant(form: CallGrammar, value: str) -> str:
    double = quoted(json.dumps(value, ensure_ascii=False))
    if any(char in value for char in "'\\\n\r"):
        return double
    return f"({double} | {quoted(f'{chr(39)}{value}{chr(39)}')})"


PYTHON_NOTATION = Notation(
    null="None",
    true="True",
    false="False",
    key=lambda form, key: f"{_python_constant(form, key)} {quoted(': ')}",
    text=_python_text,
    constant=_python_constant,
)


def python(form: CallGrammar, index: int, name: str, schema: Schema) -> str:
    """Return Lark of f(a=1, b='x')."""
    if name in form.free:
        value = form.as_json({})
        some = f'({FREE_KEY} "=" {value} (", " {FREE_KEY} "=" {value})*)?'
        return f"{quoted(name + '(')} {some} {quoted(')')}"
    values = ValueGrammar(form, PYTHON_NOTATION, schema, f"v_{index}")
    root = resolved_root(schema)
    keys, required = plain_object(root)
    if not all(key.isidentifier() and key.isascii() for key in keys):
        raise Inexpressible("a property that is not an identifier")
    properties = root.get("properties") or {}

    def field(key: str) -> str:
        return f"{quoted(key + '=')} {values.value(properties[key])}"

    return f"{quoted(name + '(')} {values.fields(keys, required, 'args', field)} {quoted(')')}"


def _braced_key(form: CallGrammar, key: str) -> str:
    if not key or key.strip() != key or set(key) & set(':{}[],"<\n'):
        raise Inexpressible("a property that needs quotes")
    return quoted(f"{key}:")


def braced(quote: str) -> Rule:
    """Return the function for {a:"x",b:1}, with `quote` instead of the double quotes."""

    def text(form: CallGrammar, schema: Schema) -> str:
        try:
            inside = all_of([*text_expressions(schema), *without([quote])])
        except Inexpressible:
            return f"({form.as_json(schema)})"
        ended = form.ended(inside, quote, is_empty=may_be_empty(schema))
        return f"({form.text(quote)} {ended})"

    def constant(form: CallGrammar, value: str) -> str:
        if quote in value:
            return quoted(json.dumps(value, ensure_ascii=False))
        return form.text(f"{quote}{value}{quote}")

    notation = Notation(comma=",", key=_braced_key, text=text, constant=constant)

    def rule(form: CallGrammar, index: int, name: str, schema: Schema) -> str:
        if name in form.free:
            return form.as_json(schema)
        values = ValueGrammar(form, notation, schema, f"v_{index}")
        root = resolved_root(schema)
        keys, required = plain_object(root)
        properties = root.get("properties") or {}

        def field(key: str) -> str:
            return f"{_braced_key(form, key)} {values.value(properties[key])}"

        return f"{quoted('{')} {values.fields(keys, required, 'args', field)} {quoted('}')}"

    return rule
