"""Structural tags: free text with tagged parts in a format, such as tool calls.

Two notations are accepted, vLLM's older one and xgrammar's `triggered_tags`:

    {"structures": [{"begin": "<f=a>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}
    {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [{"type": "tag", "begin":
     "<f=a>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}]}}

When the text contains a trigger, it must continue as one of the tags that begin with the trigger.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qserve.errors import ParameterError

# remedy
EXAMPLE = 'for example {"type": "triggered_tags", "triggers": [...], "tags": [...]}'
NAME = "structured_outputs.structural_tag"
MAX_TAGS = 256
CONTENTS = {"json_schema": "json_schema", "regex": "pattern", "const_string": "value"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    begin: str
    kind: str  # type of the content, key of CONTENTS
    content: Any
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    """Tags and triggers. Raises ParameterError unless each tag starts with exactly one trigger."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False

    def __post_init__(self) -> None:
        for name, values in (("triggers", self.triggers), ("tags", self.tags)):
            if not 1 <= len(values) <= MAX_TAGS:
                raise _wrong(f"expected 1 to {MAX_TAGS} {name}, found {len(values)}")
        if not all(self.triggers):
            raise _wrong("expected triggers that are not empty")
        for tag in self.tags:
            self.trigger_of(tag)

    def trigger_of(self, tag: Tag) -> int:
        """Return the index of the trigger that a tag starts with."""
        found = [i for i, text in enumerate(self.triggers) if tag.begin.startswith(text)]
        if len(found) != 1:
            raise _wrong(f"{tag.begin!r:.100} begins with {len(found)} of the triggers, expected 1")
        return found[0]

    def lark(self, body_of: Callable[[Tag], str]) -> str:
        """Return the grammar. `body_of`: returns Lark of a tag's content."""
        some = " | ".join(f"tag_{number}" for number in range(len(self.tags)))
        many = "+" if self.at_least_one else "*"
        start = f"({some}){many} rest"
        if self.stop_after_first:
            start = f"({some})" if self.at_least_one else f"({some}) | rest"
        lines = [f"start: {start}", "rest: TEXT", r"TEXT: /(.|\n)*/"]
        lines += [
            f"trigger_{number}[lazy]: TEXT {_quoted(text)}"
            for number, text in enumerate(self.triggers)
        ]
        for number, tag in enumerate(self.tags):
            trigger = self.trigger_of(tag)
            after = tag.begin[len(self.triggers[trigger]) :]
            parts = (f"trigger_{trigger}", _quoted(after), body_of(tag), _quoted(tag.end))
            lines.append(f"tag_{number}: {' '.join(filter(None, parts))}")
        return "\n".join(lines)


def read(text: str) -> StructuralTag:
    """Parse the tags of a JSON text. Raises ParameterError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"expected JSON: {error}") from None
    form = found.get("format") if isinstance(found, dict) else None
    if form is None:
        found = _part(found, "it", structures=list, triggers=list)
        return StructuralTag(
            triggers=_texts(found["triggers"]), tags=tuple(map(_structure, found["structures"]))
        )
    form = _part(form, "format", type=str, triggers=list, tags=list)
    if form["type"] != "triggered_tags":
        raise _wrong(f"expected a format of type triggered_tags, found {form['type']!r:.100}")
    flags = {name: form.get(name, False) for name in ("at_least_one", "stop_after_first")}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise _wrong(f"expected {' and '.join(flags)} to be true or false")
    return StructuralTag(
        triggers=_texts(form["triggers"]), tags=tuple(map(_tag, form["tags"])), **flags
    )


def _structure(found: Any) -> Tag:
    found = _part(found, "each of structures", begin=str, schema=dict, end=str)
    schema = found["schema"]
    return Tag(begin=found["begin"], kind="json_schema", content=schema, end=found["end"])


def _tag(found: Any) -> Tag:
    found = _part(found, "each of tags", begin=str, content=dict, end=str)
    content = found["content"]
    kind = content.get("type")
    if kind not in CONTENTS:
        raise _wrong(f"expected content of type {', '.join(CONTENTS)}, found {kind!r:.100}")
    value = content.get(CONTENTS[kind])
    if not isinstance(value, dict | bool if kind == "json_schema" else str):
        raise _wrong(f"expected {CONTENTS[kind]} in content of type {kind}")
    return Tag(begin=found["begin"], kind=kind, content=value, end=found["end"])


def _part(found: Any, what: str, **types: type) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise _wrong(f"expected {what} to be an object")
    for name, kind in types.items():
        if not isinstance(found.get(name), kind):
            raise _wrong(f"expected {what} to have {name}")
    return found


def _texts(values: list[Any]) -> tuple[str, ...]:
    if not all(isinstance(value, str) for value in values):
        raise _wrong("expected triggers to be texts")
    return tuple(values)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _wrong(problem: str) -> ParameterError:
    return ParameterError(NAME, problem, EXAMPLE)
