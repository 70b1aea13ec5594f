"""Readers of calls in JSON: arguments after a name, objects with name and arguments, Mistral's."""

import re

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.notations.json_reading import json_text, json_value
from qserve.output_parsing.reading import BrokenCall, Reader, after_space, skip, until
from qserve.output_parsing.tool_format import Start

MISTRAL = "[TOOL_CALLS]"
ARGUMENTS = ("arguments", "parameters")  # formats use either key, and models confuse them
# keys of an object that may be a call
KEYS = ("name", *ARGUMENTS, "type", "id", "index", "function")
# Characters after a call whose last bracket is missing: of the next call, of an end tag, or none.
UNCLOSED = ("{", "<", "[", "]", ";", "")

# Start of the next call inside the text of a broken call, whose unclosed string contains the next
# call. The group is the marker.
HERMES_AGAIN = re.compile(r'(<tool_call>)\s*(?:\[\s*)?\{\s*"')
LLAMA_AGAIN = re.compile(r'[\n;] ?()\{\s*"')
MISTRAL_AGAIN = re.compile(
    r'(\[TOOL_CALLS\])\s*(?:\[\s*\{\s*"|[\w.-]+(?:\[ARGS\])?\s*\{)|\}\s*(?:,\s*)?()\{\s*"'
)


def arguments(calls: Calls, start: Start) -> Reader[str]:
    """Read {...} after the name. It may be missing, for a tool without arguments."""
    if start.char not in ("{", "<", "`"):
        raise BrokenCall
    calls.name(start.name)
    char = start.char
    if char == "{":
        char = yield from json_value(char, calls.arguments)
    else:
        calls.arguments("{}")
    calls.end()
    return char


def objects(calls: Calls, start: Start, name_key: str = "name") -> Reader[str]:
    """Read one or several {"name": ..., "arguments": {...}}, or a list of them."""
    char = start.char
    if char == "[":
        return (yield from _list(calls, (yield from after_space()), name_key=name_key))
    while True:
        char = yield from call_object(char, calls, name_key=name_key)
        char = yield from after_space(char, also=",")
        if char != "{":
            return char


def cohere(calls: Calls, start: Start) -> Reader[str]:
    """Read {"tool_call_id": ..., "tool_name": ..., "parameters": {...}}, or a list of them."""
    return (yield from objects(calls, start, "tool_name"))


def bare_objects(calls: Calls, start: Start) -> Reader[str]:
    """Read one or several {"name": ..., "parameters": {...}}. Other JSON objects are content.

    Between calls there may be semicolons, commas, white space, or nothing.
    """
    char = start.char
    while True:
        char = yield from call_object(char, calls, is_strict=True)
        char = yield from after_space(char, also=",;")
        if char != "{":
            return "".join(calls.raw) if char else ""


def bare_list(calls: Calls, start: Start) -> Reader[str]:
    """Read [{"name": ..., "arguments": {...}}, ...] without markers. Other lists are content."""
    char = start.char
    if char == "[":
        char = yield from after_space()
    return (yield from _list(calls, char, is_strict=True))


def required(calls: Calls, start: Start) -> Reader[str]:
    """Read the JSON list of calls that the grammar enforces for models without a known format."""
    return (yield from _list(calls, (yield from after_space())))


def _list(
    calls: Calls, char: str, *, is_strict: bool = False, name_key: str = "name"
) -> Reader[str]:
    """Read the objects of a list. Its opening bracket has been read."""
    kind = {"is_strict": is_strict, "name_key": name_key}
    while True:
        char = yield from call_object(char, calls, is_alone=False, **kind)
        char = yield from after_space(char, also=",")
        if char == "]" or not char:
            return ""
        if char != "{":
            raise BrokenCall


def mistral(calls: Calls, start: Start) -> Reader[str]:
    """Read [TOOL_CALLS] and a list; or, with newer tokenizers, [TOOL_CALLS]name[ARGS]{...} each."""
    char = start.char
    if not start.marker:
        return (yield from _list(calls, char, is_strict=True))
    if char == "[":
        return (yield from _list(calls, (yield from after_space())))
    while True:
        rest, end = yield from until("[{")
        name = (char + rest).strip()
        while end == "[":
            control, _ = yield from until("]")
            if control == "CALL_ID":
                _, end = yield from until("[{")
            elif control == "ARGS":
                end = yield from after_space()
            else:
                raise BrokenCall
        if not name or end != "{":
            raise BrokenCall
        calls.name(name)
        behind = yield from json_value(end, calls.arguments)
        calls.end()
        behind = yield from skip(MISTRAL, behind)
        if behind:
            return behind
        char = yield from after_space()


def call_object(
    char: str,
    calls: Calls,
    *,
    is_strict: bool = False,
    is_alone: bool = True,
    name_key: str = "name",
) -> Reader[str]:
    """Read a call that starts with `char`. Returns the first character after it, without space.

    is_strict: an object with an unknown name or other keys is not a call
    is_alone: with `is_strict`, an object without arguments is not a call either
    name_key: key of the tool's name

    One closing bracket of the object itself, outside of the arguments, may be missing or doubled.
    """
    if char != "{":
        raise BrokenCall
    name, held, has_arguments = None, [], False
    char = yield from after_space()
    while True:
        if char != '"':
            raise BrokenCall
        key = yield from json_text()
        if is_strict and key not in KEYS:
            raise BrokenCall
        if (yield from after_space()) != ":":
            raise BrokenCall
        char = yield from after_space()
        if key == name_key:
            if char != '"' or name is not None:
                raise BrokenCall
            name = yield from json_text()
            if not name or (is_strict and name not in calls.tools):
                raise BrokenCall
            char = yield
            if has_arguments:
                calls.name(name)
                calls.arguments("".join(held))
        elif key in ARGUMENTS and char == "n":
            char = yield from json_value(char, len)  # null means no arguments
        elif key in ARGUMENTS:
            if char != "{" or has_arguments:
                raise BrokenCall
            has_arguments = True
            if name is None:
                char = yield from json_value(char, held.append)
            else:
                calls.name(name)
                char = yield from json_value(char, calls.arguments)
        else:
            char = yield from json_value(char, len)
        char = yield from after_space(char, also=",")
        if char == "}" or (name and has_arguments and char in UNCLOSED):
            break
    if name is None or (is_strict and is_alone and not has_arguments):
        raise BrokenCall
    if not has_arguments:
        calls.name(name)
        calls.arguments("{}")
    calls.end()
    return (yield from after_space(char, also="}"))
