"""Structural tags: what a grammar of them takes and refuses, and what an engine writes under it."""

import json
import re

import pytest

from qserve import LLM, SamplingParams
from qserve.errors import ParameterError
from qserve.structured.backend import library
from qserve.structured.grammar import check_grammar, grammar_text
from qserve.structured.params import StructuredOutputsParams

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
OLD = {
    "structures": [
        {"begin": "<f=weather>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=count>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAGS = [
    {
        "type": "tag",
        "begin": "<f=weather>",
        "content": {"type": "json_schema", "json_schema": CITY},
        "end": "</f>",
    },
    {"begin": "<f=count>", "content": {"type": "regex", "pattern": "-?[0-9]+"}, "end": "</f>"},
]
NEW = {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}}
WEATHER = '<f=weather>{"city": "Oslo"}</f>'


@pytest.fixture(scope="module")
def accepts(docs_5m):
    """accepts(form, text): "all", "begin" where more has to come, or "no"."""
    tokenizer = library().LLTokenizer((docs_5m / "tokenizer.json").read_text())

    def judge(form, text):
        grammar = grammar_text(StructuredOutputsParams(structural_tag=form))
        matcher = library().LLMatcher(tokenizer, grammar)
        tokens = tokenizer.tokenize_str(text)
        if matcher.validate_tokens(tokens) < len(tokens):
            return "no"
        matcher.consume_tokens(tokens)
        return "all" if matcher.is_accepting() else "begin"

    return judge


@pytest.mark.parametrize("form", [OLD, NEW])
@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Plain text, 1 < 2, <f and </f>.", "all"),
        (f"Look: {WEATHER} and <f=count>-17</f> done.", "all"),
        (WEATHER, "all"),
        ("Look: <f=", "begin"),
        ('<f=weather>{"city"', "begin"),
        ("Look: <f=other>", "no"),
        ('<f=weather>{"city": "Paris"}</f>', "no"),
        ("<f=count>x</f>", "no"),
        (f"{WEATHER}\n<f=weather>free text", "no"),
    ],
)
def test_trigger_starts_a_tag(accepts, form, text, verdict):
    assert accepts(form, text) == verdict


@pytest.mark.parametrize(
    ("flags", "text", "verdict"),
    [
        ({"at_least_one": True}, "Plain text.", "begin"),
        ({"at_least_one": True}, f"Look: {WEATHER} done.", "all"),
        ({"stop_after_first": True}, f"{WEATHER} done.", "no"),
        ({"stop_after_first": True}, "Plain text.", "all"),
        ({"at_least_one": True, "stop_after_first": True}, f"Look: {WEATHER}", "all"),
    ],
)
def test_flags_of_triggered_tags(accepts, flags, text, verdict):
    assert accepts({"format": {**NEW["format"], **flags}}, text) == verdict


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({}, "expected it to have structures"),
        ({**OLD, "triggers": []}, "1 to 256 triggers"),
        ({**OLD, "triggers": ["<g="]}, "begins with 0 of the triggers"),
        ({**OLD, "triggers": ["<f=", "<"]}, "begins with 2"),
        ({**OLD, "triggers": [""]}, "triggers that are not empty"),
        ({"format": {"type": "sequence", "triggers": [], "tags": []}}, "triggered_tags"),
        ({"format": {**NEW["format"], "tags": [{"begin": "<f=", "end": ""}]}}, "content"),
        (
            {"structures": [{"begin": "<f=", "schema": {"type": "x"}, "end": ""}]} | {},
            "triggers",
        ),
        ({**OLD, "structures": [{"begin": "<f=", "schema": {"$ref": "#/no"}, "end": ""}]}, "used"),
        ("{", "expected JSON"),
    ],
)
def test_invalid_structural_tags_are_refused(form, problem):
    with pytest.raises(ParameterError, match=problem):
        check_grammar(StructuredOutputsParams(structural_tag=form))


@pytest.mark.exhaustive
def test_tag_contents_match_their_schema(docs_5m):
    form = {"format": {**NEW["format"], "at_least_one": True, "triggers": ["<"]}}
    llm = LLM(str(docs_5m), max_model_len=256, cpu_kv_cache_memory=0.1)
    params = [
        SamplingParams(
            structured_outputs={"structural_tag": form},
            temperature=1.0,
            seed=seed,
            max_tokens=120,
            logit_bias={llm.get_tokenizer().encode("<")[0]: 8.0},
        )
        for seed in range(4)
    ]
    found = [each.outputs[0].text for each in llm.generate(["Call: "] * 4, params, False)]
    tags = [tag for text in found for tag in re.findall(r"<f=(\w+)>(.*?)</f>", text, re.DOTALL)]
    assert len(tags) > 3
    for name, content in tags:
        assert isinstance(json.loads(content), dict if name == "weather" else int)
