"""Reader of Harmony, the format of gpt-oss: messages in channels, which may be sent to a tool.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>

A message in the channel `analysis` is reasoning, a message to a tool is a call, and any other
message is content. The prompt ends with <|start|>assistant, so an output starts inside a message's
header.
"""

import re
from typing import TYPE_CHECKING, Any

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.notations.json_reading import json_value
from qserve.output_parsing.reading import SPACE, BrokenCall, Emit, Reader
from qserve.output_parsing.tool_format import Start

if TYPE_CHECKING:
    from qserve.output_parsing.grammars.call_grammar import CallGrammar

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL, CONSTRAIN = "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
OPENS = (START, CHANNEL)  # texts that start a header
STOPS = (RETURN, CALL)  # tokens that end the model's turn
MAX_HEADER_CHARS = 512
ANALYSIS = "analysis"
TOOLS = "functions."
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([a-z]+)")
RECIPIENT = re.compile(r"to=\s*([^\s<]+)")
PEOPLE = ("assistant", "user", "all", "system", "developer")


def harmony(calls: Calls, start: Start) -> Reader[str]:
    """Read all messages of an output."""
    marker = start.marker
    first: str | None = start.char
    while True:
        if marker in OPENS:
            header = [marker]
            while marker != MESSAGE:
                marker = yield from _segment(header.append, first)
                first = None
                if not marker:
                    return ""  # the output ends inside a header
                if marker in STOPS or sum(map(len, header)) > MAX_HEADER_CHARS:
                    raise BrokenCall
                header.append(marker)
            marker = yield from _message("".join(header), calls)
        else:  # text between messages, which models should not write
            marker = yield from _segment(calls.content, first)
        first = None
        calls.raw = []
        if not marker:
            return ""


def _message(header: str, calls: Calls) -> Reader[str]:
    """Read a message after its header. Returns the marker after the message."""
    channel = CHANNEL_NAME.search(header)
    recipient = RECIPIENT.search(header)
    address = recipient[1] if recipient else ""
    name = address.removeprefix(TOOLS)
    if name and name not in PEOPLE and (address != name or name in calls.tools):
        return (yield from _call(name, calls))
    is_reasoning = channel is not None and channel[1] == ANALYSIS
    calls.raw = []
    return (yield from _segment(calls.reasoning if is_reasoning else calls.content))


def _call(name: str, calls: Calls) -> Reader[str]:
    calls.name(name)
    char = yield
    while char and char in SPACE:
        char = yield
    if char == "{":
        char = yield from json_value(char, calls.arguments)
    elif char != "<":
        raise BrokenCall
    else:
        calls.arguments("{}")
    calls.end()
    return (yield from _segment(lambda text: None, char))


def _segment(emit: Emit, first: str | None = None) -> Reader[str]:
    """Read text up to a marker. Returns the marker; "" at the end of the output."""
    held = ""  # characters that may start a marker
    char = (yield) if first is None else first
    while char:
        held += char
        while held and not any(marker.startswith(held) for marker in MARKERS):
            emit(held[0])
            held = held[1:]
        if held in MARKERS:
            return held
        char = yield
    if held:
        emit(held)
    return ""


def lark(form: "CallGrammar") -> str:
    """Return Lark of one call, which ends the model's turn."""

    def body(index: int, name: str, schema: Any) -> str:
        opening = f"{CHANNEL}commentary to={TOOLS}{name} {CONSTRAIN}json{MESSAGE}"
        return f"{form.text(opening)} {form.as_json(schema)}"

    return form.each(body)
