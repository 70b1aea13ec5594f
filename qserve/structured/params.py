"""StructuredOutputsParams: the format of an output. Field names follow vLLM's.

This module imports no third-party package.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from qserve.errors import ParameterError
from qserve.params.known_fields import names_unknown_fields
from qserve.params.parameter_types import shown

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_SCHEMA_CHARS = 512 * 1024
MAX_GRAMMAR_CHARS = 64 * 1024  # limit of a grammar, of a regex, and of all choices together
MAX_CHOICES = 4096
MAX_DEPTH = 64  # maximum nesting of brackets
FIELD = "structured_outputs"


@names_unknown_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Format of an output. Set exactly one of json, regex, choice, grammar, json_object and
    structural_tag. Raises ParameterError.

    Between the parts of a JSON text, white space is optional and short: none, a space, or a line
    break with indentation. `disable_any_whitespace` forbids it; `whitespace_pattern` replaces it.
    """

    json: str | Mapping[str, Any] | bool | None = None  # JSON schema, as text or dict
    regex: str | None = None  # matches the whole output; Rust's syntax, and look-ahead
    choice: Sequence[str] = ()  # the output is one of these texts
    grammar: str | None = None  # Lark, or GBNF (llama.cpp's format)
    json_object: bool = False  # the output is any JSON object
    structural_tag: str | Mapping[str, Any] | None = (
        None  # free text with tagged parts in a format; JSON text or dict
    )
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False  # for schemas that do not set additionalProperties
    whitespace_pattern: str | None = None
    # Lark with a rule `calls`, an alternative to the format: tool calls.
    calls: str = ""
    only_calls: bool = False  # True: `calls` replaces the format
    prefix: str = ""  # Lark with a rule `prefix`, before the format: the model's reasoning
    opening: str = ""  # Lark with a rule `opening`, before the format, but not before `calls`

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping | bool):
            object.__setattr__(self, "json", _dump("json", self.json))
        if isinstance(self.structural_tag, Mapping):
            object.__setattr__(self, "structural_tag", _dump("structural_tag", self.structural_tag))
        object.__setattr__(self, "choice", tuple(self.choice or ()))
        given = [name for name in KINDS if getattr(self, name) not in (None, (), False)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ParameterError(
                FIELD,
                f"expected exactly one of {', '.join(KINDS)}, found {found}",
                "send one of them",
            )
        self._check_types()
        getattr(self, f"_check_{self.kind}", self._check_text)()

    @property
    def kind(self) -> str:
        """The one of KINDS that is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, (), False))

    def _check_types(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "choice":
                if not all(isinstance(text, str) for text in value):
                    raise ParameterError(
                        f"{FIELD}.choice",
                        f"expected a list of texts, found {[*value]!r:.80}",
                        "put the texts in [...]",
                    )
            elif field.type in (bool, "bool"):
                if not isinstance(value, bool):
                    raise ParameterError(
                        f"{FIELD}.{field.name}",
                        f"expected true or false, found {shown(value)}",
                        "give it without quotes",
                    )
            elif value is not None and not isinstance(value, str):
                raise ParameterError(
                    f"{FIELD}.{field.name}",
                    f"expected a text, found {shown(value)}",
                    "give a string",
                )
        for name in ("whitespace_pattern", "prefix", "opening"):
            self._limit(name, getattr(self, name) or "", MAX_GRAMMAR_CHARS)
        self._limit("calls", self.calls, MAX_SCHEMA_CHARS)

    def _check_json(self) -> None:
        # Check the depth before parsing, since the parser is recursive.
        self._limit("json", self.json, MAX_SCHEMA_CHARS)
        try:
            schema = json.loads(self.json)
        except (ValueError, RecursionError) as error:
            raise ParameterError(
                f"{FIELD}.json", f"expected a JSON schema: {error}", "send an object, true or false"
            ) from None
        if not isinstance(schema, dict | bool):
            raise ParameterError(
                f"{FIELD}.json",
                f"expected a JSON schema, found {type(schema).__name__}",
                "send an object, true or false",
            )

    def _check_structural_tag(self) -> None:
        self._limit("structural_tag", self.structural_tag, MAX_SCHEMA_CHARS)

    def _check_choice(self) -> None:
        if len(self.choice) > MAX_CHOICES:
            raise ParameterError(
                f"{FIELD}.choice",
                f"expected at most {MAX_CHOICES} texts, found {len(self.choice)}",
                "send fewer, or use regex",
            )
        if not all(self.choice):
            raise ParameterError(
                f"{FIELD}.choice", "expected texts that are not empty", "remove the empty ones"
            )
        self._limit("choice", "".join(self.choice), MAX_GRAMMAR_CHARS, nests=False)

    def _check_text(self) -> None:
        if self.kind in ("regex", "grammar"):
            self._limit(self.kind, getattr(self, self.kind), MAX_GRAMMAR_CHARS)

    def _limit(self, name: str, text: str, limit: int, nests: bool = True) -> None:
        if len(text) > limit:
            raise ParameterError(
                f"{FIELD}.{name}",
                f"expected at most {limit} characters, found {len(text)}",
                "shorten it, or split the request",
            )
        if "\0" in text:
            raise ParameterError(f"{FIELD}.{name}", "expected no NUL character", "remove it")
        if nests and _depth(text) > MAX_DEPTH:
            raise ParameterError(
                f"{FIELD}.{name}", f"expected at most {MAX_DEPTH} nested levels", "flatten it"
            )


def _dump(field: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(
            f"{FIELD}.{field}", f"expected JSON: {error}", "convert the values to JSON types"
        ) from None


def _depth(text: str) -> int:
    """Return the maximum nesting of brackets. Brackets in strings count, so it may be too high."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def as_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """Convert a value given to SamplingParams: None, the parameters, or a dict of their fields."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise ParameterError(
            FIELD,
            f"expected an object, found {type(value).__name__}",
            'for example {"json": {...}}',
        )
    unknown = value.keys() - {field.name for field in fields(StructuredOutputsParams)}
    if unknown:
        raise ParameterError(
            f"{FIELD}.{min(unknown)}", "no such field", f"known: {', '.join(KINDS)}"
        )
    given = {name: each for name, each in value.items() if each is not None}
    return StructuredOutputsParams(**given)
