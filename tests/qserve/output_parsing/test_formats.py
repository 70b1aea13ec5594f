"""Each row of TOOL_PARSERS reads what its model family writes, however the text arrives."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from qserve.output_parsing.pieces import ARGUMENTS, CONTENT, NAME, merged
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from tests.qserve.output_parsing.written_calls import AT_START, HARD, ONE_CALL, TOOLS, WRITE

NAMES = [name for name in WRITE if name != "qwen3_xml"]  # another name of qwen3_coder


def pieces_of(settings, texts, is_cut=False):
    parser, found = OutputParser(settings), []
    for text in texts:
        found += parser.push(text)
    return merged(found + parser.finish(is_cut=is_cut))


def parsed(name, text, *, is_cut=False, **fields):
    """The message of a text; the same whole, in parts that begin at every position, and by
    character.
    """
    settings = ParseSettings(tool_parser=name, tools=TOOLS, **fields)
    whole = pieces_of(settings, [text], is_cut)
    third = -(-len(text) // 3)
    for at in range(1, third + 1):  # a cut in each third of the text
        parts = [text[:at], text[at:][:third], text[at + third :][:third], text[at + 2 * third :]]
        assert pieces_of(settings, parts, is_cut) == whole, parts
    assert pieces_of(settings, text, is_cut) == whole
    return Message.of(whole)


def calls_of(found):
    return [(name, json.loads(arguments)) for name, arguments in found.calls]


def test_every_row_has_a_writer():
    assert {*WRITE} == {*TOOL_PARSERS}
    assert TOOL_PARSERS["qwen3_xml"] is TOOL_PARSERS["qwen3_coder"]


@pytest.mark.parametrize("call", HARD, ids=lambda call: call[1].get("city", call[0])[:9])
@pytest.mark.parametrize("name", NAMES)
def test_single_call(name, call):
    found = parsed(name, WRITE[name]([call]))
    assert (calls_of(found), found.content) == ([call], "")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONE_CALL])
def test_parallel_calls(name):
    run = ("functions-2.run", {"command": "ls -l"})
    calls = [HARD[4], ("get_weather", {"city": "Oslo", "days": 3}), HARD[4], run]
    found = parsed(name, WRITE[name](calls))
    assert (calls_of(found), found.content) == (calls, "")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in AT_START | ONE_CALL])
def test_text_around_calls(name):
    text = WRITE[name](HARD[:1])
    found = parsed(name, f"Let me look: <b>1 < 2</b>.\n\n{text}\n\nDone, see [1] and {{x}}.")
    assert calls_of(found) == HARD[:1]
    said = "Let me look: <b>1 < 2</b>. Done, see [1] and {x}."
    assert " ".join(found.content.split()) == said


@pytest.mark.parametrize("name", NAMES)
def test_unknown_tool_name(name):
    """A call after a marker; text where only names distinguish calls from text."""
    call = ("forecast", {"place": "Rome"})
    found = parsed(name, WRITE[name]([call]))
    if TOOL_PARSERS[name].is_bare:
        assert (found.calls, found.content) == ([], WRITE[name]([call]))
    else:
        assert (calls_of(found), found.content) == ([call], "")


@pytest.mark.parametrize("name", NAMES)
def test_truncation_at_every_position(name):
    """At the token limit what was read is kept: no text of the call becomes content."""
    text = WRITE[name](HARD[:1])
    settings = ParseSettings(tool_parser=name, tools=TOOLS)
    (_, whole) = Message.of(pieces_of(settings, [text])).calls[0]
    for end in range(len(text)):
        found = Message.of(pieces_of(settings, [text[:end]], is_cut=True))
        if found.calls:
            assert found.calls[0][0] == "get_weather" and not found.content
            assert whole.startswith(found.calls[0][1].rstrip("}")), text[:end]
        else:
            assert found.content in (text[:end], "")
        found = Message.of(pieces_of(settings, [text[:end]]))
        for _, arguments in found.calls:
            json.loads(arguments)


@pytest.mark.parametrize("name", NAMES)
def test_stream_sends_name_once_then_arguments(name):
    """Clients want the name complete and first, and arguments whose pieces join to JSON."""
    parser = OutputParser(ParseSettings(tool_parser=name, tools=TOOLS))
    pieces = [piece for char in WRITE[name](HARD[:1]) for piece in parser.push(char)]
    pieces += parser.finish()
    kinds = [piece.kind for piece in pieces if piece.kind != CONTENT]
    assert kinds[0] == NAME and {*kinds[1:]} == {ARGUMENTS} and len(kinds) > 5
    assert pieces[0].text == "get_weather"


WORDS = ("see", "<", "</", "[", "{", "\n", " ", "tool_call>", "a", "é", "functools", "```", '"')


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(max_examples=150, deadline=None)
def test_random_splits(data, name):
    text, expected = data.draw(outputs(name))
    whole = pieces_of(ParseSettings(tool_parser=name, tools=TOOLS), [text])
    assert calls_of(Message.of(whole)) == expected
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]
    assert pieces_of(ParseSettings(tool_parser=name, tools=TOOLS), parts) == whole


@st.composite
def outputs(draw, name):
    """An output with some calls, and these."""
    most = 1 if name in ONE_CALL else 4
    calls = draw(st.lists(st.sampled_from(HARD), min_size=1, max_size=most))
    before = "" if name in AT_START | ONE_CALL else "".join(draw(st.lists(st.sampled_from(WORDS))))
    if name in ("granite", "xlam", "phi4_mini", "deepseek_v3") or before[-1:] in ("<", "[", "/"):
        before += "\n"  # a marker is not a part of another word
    return before + WRITE[name](calls), calls
