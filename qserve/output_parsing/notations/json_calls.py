"""Calls as JSON: arguments after a name, objects with name and arguments, Mistral's format."""

import re

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.notations.json_reading import json_text, json_value
from qserve.output_parsing.reading import BrokenCall, Reader, after_space, skip, until
from qserve.output_parsing.tool_format import Start

MISTRAL = "[TOOL_CALLS]"
ARGUMENTS = ("arguments", "parameters")  # formats differ, and models mix them up
# fields of a call, other than content
KEYS = ("name", *ARGUMENTS, "type", "id", "index", "function")
# What follows a call whose last bracket is missing: the next call, an end tag, the end of the text.
UNCLOSED = ("{", "<", "[", "]", ";", "")

# Start of a call inside the text of a broken one: an unclosed string swallows what follows. The
# group is the marker.
HERMES_AGAIN = re.compile(r'(<tool_call>)\s*(?:\[\s*)?\{\s*"')
LLAMA_AGAIN = re.compile(r'[\n;] ?()\{\s*"')
MISTRAL_AGAIN = re.compile(
    r'(\[TOOL_CALLS\])\s*(?:\[\s*\{\s*"|[\w.-]+(?:\[ARGS\])?\s*\{)|\}\s*(?:,\s*)?()\{\s*"'
)


def arguments(calls: Calls, start: Start) -> Reader[str]:
    """{...} after the name; nothing if the tool takes no arguments."""
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


def objects(calls: Calls, start: Start) -> Reader[str]:
    """{"name": ..., "arguments": {...}}, one or several, or a list of them."""
    char = start.char
    if char == "[":
        return (yield from _list(calls, (yield from after_space())))
    while True:
        char = yield from call_object(char, calls)
        char = yield from after_space(char, also=",")
        if char != "{":
            return char


def bare_objects(calls: Calls, start: Start) -> Reader[str]:
    """{"name": ..., "parameters": {...}}, repeated. Other JSON objects are content.

    Calls may be separated by semicolons, commas, white space, or nothing.
    """
    char = start.char
    while True:
        char = yield from call_object(char, calls, is_strict=True)
        char = yield from after_space(char, also=",;")
        if char != "{":
            return "".join(calls.raw) if char else ""


def bare_list(calls: Calls, start: Start) -> Reader[str]:
    """[{"name": ..., "arguments": {...}}, ...] without markers. Other lists are content."""
    char = start.char
    if char == "[":
        char = yield from after_space()
    return (yield from _list(calls, char, is_strict=True))


def required(calls: Calls, start: Start) -> Reader[str]:
    """The list that a grammar enforces for models without a format of their own."""
    return (yield from _list(calls, (yield from after_space())))


def _list(calls: Calls, char: str, *, is_strict: bool = False) -> Reader[str]:
    """Read the objects of a list whose opening bracket has been read."""
    while True:
        char = yield from call_object(char, calls, is_strict=is_strict, is_alone=False)
        char = yield from after_space(char, also=",")
        if char == "]" or not char:
            return ""
        if char != "{":
            raise BrokenCall


def mistral(calls: Calls, start: Start) -> Reader[str]:
    """[TOOL_CALLS] and a list; with newer tokenizers [TOOL_CALLS]name[ARGS]{...}, repeated."""
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
    char: str, calls: Calls, *, is_strict: bool = False, is_alone: bool = True
) -> Reader[str]:
    """Read a call that begins with `char`; return the first character after it and white space.

    `is_strict`: an object with an unknown name or other keys is other JSON, and so is one that
    `is_alone` and has no arguments. One closing bracket of the object itself, outside of the
    arguments, may be missing or superfluous.
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
        if key == "name":
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
            char = yield from json_value(char, len)  # null: none
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
