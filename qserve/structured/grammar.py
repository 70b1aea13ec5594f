"""Converts StructuredOutputsParams to the grammar text that llguidance compiles."""

import json
from collections.abc import Sequence
from typing import Any

from qserve.errors import ParameterError
from qserve.structured import free_json, structural_tag
from qserve.structured.backend import library, limits
from qserve.structured.lark_text import quoted
from qserve.structured.params import FIELD, StructuredOutputsParams
from qserve.structured.pattern_algebra import UnsupportedPattern
from qserve.structured.pattern_rewrite import has_look_around, rewrite
from qserve.structured.schema_facts import Unsupported
from qserve.structured.schema_rewrite import enforceable

# Default white space in JSON. Models trained on indented JSON write line breaks. Without a limit,
# weak models would fill the output with white space.
SHORT_WHITESPACE = r"( |\n[ \t]{0,40})"
# llguidance builds an automaton with as many states; above the limit this takes seconds.
MAX_MULTIPLE_OF = 100_000
MAX_REASON = 300  # characters of llguidance's message that an error shows


def grammar_text(params: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's JSON.

    Raises ParameterError, and InputError if llguidance is not installed.
    """
    if params.only_calls:
        return _dump([{"lark_grammar": f"start: {_prefix(params)} calls\n{_rules(params)}"}])
    body = _BODIES[params.kind](params)
    if not params.prefix and not params.calls and not params.opening:
        return _dump([body])
    choice = f"{'opening' if params.opening else ''} @body"
    if params.calls:
        choice = f"({choice} | calls)"
    start = {"lark_grammar": f"start: {_prefix(params)} {choice}\n{_rules(params)}"}
    return _dump([start, body | {"name": "body"}])


def _prefix(params: StructuredOutputsParams) -> str:
    return "prefix" if params.prefix else ""


def _rules(params: StructuredOutputsParams) -> str:
    return "\n".join(filter(None, (params.prefix, params.opening, params.calls)))


def check_grammar(params: StructuredOutputsParams) -> None:
    """Raise ParameterError with the reason if llguidance rejects the grammar.

    The check takes about a millisecond; half a second for a schema with thousands of properties.
    """
    text = grammar_text(params)
    is_wrong, messages = library().LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    if is_wrong:
        raise refusal(params, messages[0])


def json_rule(params: StructuredOutputsParams, schema: dict | bool) -> str:
    """Return Lark of a JSON value that fits a schema, with white space as in the parameters."""
    found = _schema(params, schema)
    if "lark_grammar" in found:
        return f"%lark {{\n{found['lark_grammar']}\n}}"
    return f"%json {json.dumps(found['json_schema'])}"


def refusal(params: StructuredOutputsParams, reason: str) -> ParameterError:
    """Return the ParameterError for llguidance's reason of a rejection."""
    line = " ".join(reason.split("<state>")[0].split("<non-verbose/>")[0].split())
    return ParameterError(
        f"{FIELD}.{params.kind}",
        f"cannot be used: {line[:MAX_REASON]}",
        "simplify it, or send another one",
    )


def _json(params: StructuredOutputsParams) -> dict[str, Any]:
    return _schema(params, json.loads(params.json))


def _json_object(params: StructuredOutputsParams) -> dict[str, Any]:
    return _schema(params, {"type": "object"})


def _schema(params: StructuredOutputsParams, schema: dict | bool) -> dict[str, Any]:
    rewritten, _ = _enforceable(params, schema)
    schema = json.loads(rewritten)
    start = free_json.start_of(schema)
    if start is not None:
        return {"lark_grammar": free_json.lark(start, _whitespace_in_lark(params))}
    if isinstance(schema, bool):
        schema = {"enum": []}  # True is free JSON
    free_json.limit_free_values_(schema)
    return {"json_schema": schema | {"x-guidance": whitespace(params)}}


def _enforceable(params: StructuredOutputsParams, schema: dict | bool) -> tuple[str, Sequence[str]]:
    _check_schema(schema)
    if params.disable_additional_properties:
        schema = _closed(schema)
    try:
        return enforceable(json.dumps(schema, ensure_ascii=False))
    except Unsupported as error:
        raise refusal(params, str(error)) from None


def unenforced(params: StructuredOutputsParams) -> Sequence[str]:
    """Return warnings about keywords that the grammar does not enforce. Raises ParameterError."""
    if params.kind == "json":
        return _enforceable(params, json.loads(params.json))[1]
    if params.kind != "structural_tag":
        return ()
    tags = structural_tag.read(params.structural_tag).tags
    schemas = [tag.content for tag in tags if isinstance(tag.content, dict)]
    return [each for schema in schemas for each in _enforceable(params, schema)[1]]


def whitespace(params: StructuredOutputsParams) -> dict[str, Any]:
    """Return llguidance's options for white space."""
    pattern = _whitespace_pattern(params)
    return {"whitespace_flexible": False} if pattern is None else {"whitespace_pattern": pattern}


def _whitespace_pattern(params: StructuredOutputsParams) -> str | None:
    if params.whitespace_pattern is not None:
        return params.whitespace_pattern
    return None if params.disable_any_whitespace else SHORT_WHITESPACE


def _whitespace_in_lark(params: StructuredOutputsParams) -> str | None:
    pattern = _whitespace_pattern(params)
    return None if pattern is None else library().regex_to_lark(pattern, "")


def _regex(params: StructuredOutputsParams) -> dict[str, Any]:
    # The whole output must match anyway, so drop ^ and $ at the ends.
    pattern = params.regex
    if has_look_around(pattern):
        try:
            pattern = rewrite((f"^(?:{pattern})$",))
        except UnsupportedPattern as error:
            raise refusal(params, str(error)) from None
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith(r"\$"):
        pattern = pattern[:-1]
    return {"lark_grammar": f"start: /{library().regex_to_lark(pattern, '')}/"}


def _choice(params: StructuredOutputsParams) -> dict[str, Any]:
    return {"lark_grammar": f"start: {' | '.join(map(quoted, params.choice))}"}


def _grammar(params: StructuredOutputsParams) -> dict[str, Any]:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return {"lark_grammar": any_to_lark(params.grammar)}
    except Exception as error:  # the parser raises exceptions of any class
        raise refusal(params, str(error)) from None


def _structural_tag(params: StructuredOutputsParams) -> dict[str, Any]:
    def body(tag: structural_tag.Tag) -> str:
        if tag.kind == "const_string":
            return quoted(tag.content) if tag.content else ""
        if tag.kind == "regex":
            return f"/{library().regex_to_lark(tag.content, '')}/"
        return json_rule(params, tag.content)

    return {"lark_grammar": structural_tag.read(params.structural_tag).lark(body)}


_BODIES = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def _dump(grammars: list[dict]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _check_schema(value: Any) -> None:
    """Raise ParameterError for schemas that would take llguidance seconds."""
    if isinstance(value, list):
        for each in value:
            _check_schema(each)
        return
    if not isinstance(value, dict):
        return
    factor = value.get("multipleOf")
    if isinstance(factor, int | float) and factor > MAX_MULTIPLE_OF:
        raise ParameterError(
            f"{FIELD}.json",
            f"expected multipleOf up to {MAX_MULTIPLE_OF}, found {factor}",
            "lower it, or use minimum and maximum",
        )
    for each in value.values():
        _check_schema(each)


def _closed(value: Any) -> Any:
    """Copy a schema; set additionalProperties to false in all objects that do not set it."""
    if isinstance(value, list):
        return [_closed(each) for each in value]
    if not isinstance(value, dict):
        return value
    copy = {name: _closed(each) for name, each in value.items()}
    if isinstance(copy.get("properties"), dict) and "type" in copy:
        copy.setdefault("additionalProperties", False)
    return copy
