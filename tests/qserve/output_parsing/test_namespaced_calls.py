"""MiniMax-M3's calls: types of nested values, what is no call, and grammars of nested values."""

import json

import pytest
from transformers import AutoTokenizer

from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from tests.qserve.output_parsing.test_call_grammar import CLOSED, form_of, takes
from tests.qserve.output_parsing.written_calls import WRITE

MARK = "]<]minimax[>["
NAME = "minimax_m3"
POINT = CLOSED | {
    "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["x"],
}
TOOLS = {
    "f": CLOSED
    | {
        "properties": {
            "text": {"type": "string"},
            "point": {"$ref": "#/$defs/point"},
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
            "codes": {"type": "array", "items": {"type": "string"}},
            "rest": {"type": "object"},
        },
        "$defs": {"point": POINT},
    }
}
VALUES = [
    {"text": "1", "point": {"x": 2, "name": "007"}},
    {"points": [{"x": 1}, {"x": -5, "name": "a]<]b"}], "codes": ["007", "true", ""]},
    {"points": [], "codes": []},
    {"rest": {"a": {"b": [1, None, True, "x y"]}, "item": 2}},
]


def calls_of(text):
    return Message.of(OutputParser(ParseSettings(tool_parser=NAME, tools=TOOLS)).parse(text))


@pytest.mark.parametrize("value", VALUES)
def test_schemas_give_the_types_of_nested_values(value):
    """Where there is no schema, numbers and words of JSON are no texts."""
    ((name, arguments),) = calls_of(WRITE[NAME]([("f", value)])).calls
    assert name == "f" and json.loads(arguments) == value


@pytest.mark.parametrize("value", VALUES[:3])
def test_grammars_allow_nested_values(docs_5m, value):
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    form = form_of(NAME, tools=TOOLS_OF_GRAMMAR, free=())
    value = {key: each for key, each in value.items() if key != "rest"}
    assert takes(tokenizer, form, WRITE[NAME]([("f", value)]))


F = TOOLS["f"]
PROPERTIES = {key: each for key, each in F["properties"].items() if key != "rest"}
TOOLS_OF_GRAMMAR = {"f": F | {"properties": PROPERTIES}}


@pytest.mark.parametrize(
    "value",
    [
        {"point": {"name": "a"}},
        {"point": {"x": "a"}},
        {"points": [{"x": 1}] * 3},
        {"point": {"x": 1, "y": 2}},
    ],
)
def test_grammars_refuse_what_does_not_fit(docs_5m, value):
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    form = form_of(NAME, tools=TOOLS_OF_GRAMMAR, free=())
    assert not takes(tokenizer, form, WRITE[NAME]([("f", value)]))


RIGHT = WRITE[NAME]([("f", {"text": "a", "codes": ["b"]})])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{MARK}</text>", f"{MARK}</other>"),
        (f"{MARK}</item>", f"{MARK}</codes>"),
        (f"{MARK}<item>b", f"c{MARK}<item>b"),
        (f"{MARK}<codes>", f"{MARK}<text>"),
        (f"{MARK}</invoke>", ""),
        ('"f">', '"f>'),
    ],
)
def test_text_that_is_no_call_stays_text(before, after):
    assert before in RIGHT
    wrong = RIGHT.replace(before, after)
    found = calls_of(wrong)
    assert not found.calls and found.content == wrong


def test_depth_of_tags_is_limited():
    deep = f"{MARK}<a>" * 60 + "1" + f"{MARK}</a>" * 60
    text = f'{MARK}<tool_call>\n{MARK}<invoke name="f">{deep}{MARK}</invoke>\n{MARK}</tool_call>'
    assert not calls_of(text).calls
