"""Work of the parsers per character: it does not grow with the text before it."""

import sys

import pytest

from qserve.output_parsing.output_parser import OutputParser, ParseSettings
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from tests.qserve.output_parsing.written_calls import AT_START, ONE_CALL, TOOLS, WRITE

MAX_EVENTS_PER_CHAR = 70


def num_events(text, **fields):
    """Function calls, and resumptions of generators, while a text arrives in small pieces."""
    parser = OutputParser(ParseSettings(tools=TOOLS, **fields))
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += 1

    sys.setprofile(profile)
    try:
        for at in range(0, len(text), 4):
            parser.push(text[at : at + 4])
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


def outputs(name, size):
    """Long outputs: one long argument, many calls, and content with beginnings of markers."""
    value = "a < b, 1. \n" * size
    yield WRITE[name]([("get_weather", {"city": value})])
    if name not in ONE_CALL:
        yield WRITE[name]([("get_weather", {"city": "Oslo", "days": 3})] * (size // 10))
    if name not in AT_START:
        row = TOOL_PARSERS[name]
        yield f"see {row.markers[0][:-1]} or [1], {{x}} \n" * (size // 3)


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_tool_parsing_is_linear(name):
    for short, long in zip(outputs(name, 60), outputs(name, 240), strict=True):
        few, many = (num_events(text, tool_parser=name) for text in (short, long))
        assert many / len(long) < 1.3 * few / len(short), short[:40]
        assert many / len(long) < MAX_EVENTS_PER_CHAR


@pytest.mark.parametrize("text", ["so it <. ", "<tool_call> is a tag. ", "\n \n", "<tool_call>{"])
def test_reasoning_parsing_is_linear(text):
    fields = {"tool_parser": "hermes", "reasoning_parser": "qwen3", "prompt_end": "<think>"}
    few, many = (num_events(text * size, **fields) / size for size in (100, 400))
    assert many < 1.3 * few + 10


def test_plain_text_costs_few_events_per_token():
    """A piece of content is not read by character."""
    text = "plain text, as most of it is. " * 100
    assert num_events(text, tool_parser="hermes", reasoning_parser="qwen3") < 20 * len(text)
