"""From StructuredOutputsParams to the text that llguidance compiles. Knows no tokens."""

import json
from typing import Any

from qserve.errors import ParameterError
from qserve.structured import structural_tag
from qserve.structured.backend import library, limits
from qserve.structured.params import FIELD, StructuredOutputsParams

# Models that were trained on JSON in lines write it so. Without a bound, weak ones fill the
# output with white space.
SHORT_WHITESPACE = r"( |\n[ \t]{0,40})"
# The library builds an automaton of so many states: seconds beyond.
MAX_MULTIPLE_OF = 100_000
MAX_REASON = 300  # characters of the library's own message


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's JSON. Raises ParameterError; InputError without llguidance."""
    body = _BODIES[params.kind](params)
    if not params.prefix:
        return _dump([body])
    start = {"lark_grammar": f"start: prefix @body\n{params.prefix}"}
    return _dump([start, body | {"name": "body"}])


def check_grammar(params: StructuredOutputsParams) -> None:
    """Raise ParameterError where the library refuses the grammar, with its reason.

    Takes about a millisecond; a schema of thousands of properties, half a second.
    """
    text = grammar_text(params)
    is_wrong, messages = library().LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    if is_wrong:
        raise refusal(params, messages[0])


def refusal(params: StructuredOutputsParams, reason: str) -> ParameterError:
    """The library's reason as an error of the parameter."""
    line = " ".join(reason.split("<state>")[0].split("<non-verbose/>")[0].split())
    return ParameterError(f"{FIELD}.{params.kind}", f"cannot be used: {line[:MAX_REASON]}")


def _json(params: StructuredOutputsParams) -> dict[str, Any]:
    return _schema(params, json.loads(params.json))


def _json_object(params: StructuredOutputsParams) -> dict[str, Any]:
    return _schema(params, {"type": "object"})


def _schema(params: StructuredOutputsParams, schema: dict | bool) -> dict[str, Any]:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    _check_schema(schema)
    if params.disable_additional_properties:
        schema = _closed(schema)
    return {"json_schema": schema | {"x-guidance": whitespace(params)}}


def whitespace(params: StructuredOutputsParams) -> dict[str, Any]:
    """The library's options for white space."""
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": params.whitespace_pattern}
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": SHORT_WHITESPACE}


def _regex(params: StructuredOutputsParams) -> dict[str, Any]:
    # of Rust: ^ and $ are at the ends anyway, as the whole output has to match
    pattern = params.regex.removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith(r"\$"):
        pattern = pattern[:-1]
    return {"lark_grammar": f"start: /{library().regex_to_lark(pattern, '')}/"}


def _choice(params: StructuredOutputsParams) -> dict[str, Any]:
    return {"lark_grammar": f"start: {' | '.join(map(quoted, params.choice))}"}


def _grammar(params: StructuredOutputsParams) -> dict[str, Any]:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return {"lark_grammar": any_to_lark(params.grammar)}
    except Exception as error:  # its parser raises whatever it meets
        raise refusal(params, str(error)) from None


def _structural_tag(params: StructuredOutputsParams) -> dict[str, Any]:
    def body(tag: structural_tag.Tag) -> str:
        if tag.kind == "const_string":
            return quoted(tag.content) if tag.content else ""
        if tag.kind == "regex":
            return f"/{library().regex_to_lark(tag.content, '')}/"
        return f"%json {json.dumps(_schema(params, tag.content)['json_schema'])}"

    return {"lark_grammar": structural_tag.read(params.structural_tag).lark(body)}


_BODIES = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _dump(grammars: list[dict]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _check_schema(value: Any) -> None:
    """Refuse what takes the library seconds."""
    if isinstance(value, list):
        for each in value:
            _check_schema(each)
        return
    if not isinstance(value, dict):
        return
    factor = value.get("multipleOf")
    if isinstance(factor, int | float) and factor > MAX_MULTIPLE_OF:
        raise ParameterError(
            f"{FIELD}.json", f"expected multipleOf up to {MAX_MULTIPLE_OF}, found {factor}"
        )
    for each in value.values():
        _check_schema(each)


def _closed(value: Any) -> Any:
    """A copy of a schema in which objects have no other properties than those it names."""
    if isinstance(value, list):
        return [_closed(each) for each in value]
    if not isinstance(value, dict):
        return value
    copy = {name: _closed(each) for name, each in value.items()}
    if isinstance(copy.get("properties"), dict) and "type" in copy:
        copy.setdefault("additionalProperties", False)
    return copy
