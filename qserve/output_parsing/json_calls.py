"""Calls written as JSON objects: hermes (Qwen), llama3_json, mistral, and lists of them."""

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.json_reading import json_text, json_value
from qserve.output_parsing.reading import BrokenCall, Reader, after_space, skip, until

HERMES, HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL = "[TOOL_CALLS]"
ARGUMENTS = ("arguments", "parameters")  # formats differ, and models mix them up


def hermes(calls: Calls, marker: str) -> Reader[str]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>; the end may be missing."""
    yield from call_object((yield from after_space()), calls)
    return (yield from skip(HERMES_END))


def llama3_json(calls: Calls, marker: str) -> Reader[str]:
    """{"name": ..., "parameters": {...}}; and so on. Other JSON objects are content."""
    char = (yield from after_space()) if marker == PYTHON_TAG else marker
    while True:
        yield from call_object(char, calls, must_be_known=True)
        char = yield from after_space()
        if char != ";":
            return char
        char = yield from after_space()


def call_list(calls: Calls, marker: str = "[") -> Reader[str]:
    """[{"name": ..., "arguments": {...}}, ...]; its bracket has been read."""
    while True:
        yield from call_object((yield from after_space()), calls)
        char = yield from after_space()
        if char != ",":
            break
    if char == "]" or not char:
        return ""
    raise BrokenCall


def mistral(calls: Calls, marker: str) -> Reader[str]:
    """[TOOL_CALLS] and a list; of newer tokenizers [TOOL_CALLS]name[ARGS]{...}, repeated."""
    char = yield from after_space()
    if char == "[":
        return (yield from call_list(calls))
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


def call_object(char: str, calls: Calls, *, must_be_known: bool = False) -> Reader[None]:
    """One call that begins with `char`. `must_be_known`: else it is some other JSON object."""
    if char != "{":
        raise BrokenCall
    name, held, has_arguments = None, [], False
    while True:
        if (yield from after_space()) != '"':
            raise BrokenCall
        key = yield from json_text()
        if (yield from after_space()) != ":":
            raise BrokenCall
        char = yield from after_space()
        if key == "name":
            if char != '"' or name is not None:
                raise BrokenCall
            name = yield from json_text()
            if not name or (must_be_known and name not in calls.tools):
                raise BrokenCall
            char = yield
            if has_arguments:
                calls.name(name)
                calls.arguments("".join(held))
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
        char = yield from after_space(char)
        if char == "}":
            break
        if char != ",":
            raise BrokenCall
    if name is None or (must_be_known and not has_arguments):
        raise BrokenCall
    if not has_arguments:
        calls.name(name)
        calls.arguments("{}")
    calls.end()
