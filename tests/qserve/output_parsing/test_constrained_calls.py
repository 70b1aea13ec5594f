"""Calls that are required: what a model writes under their grammar is one, or is cut short."""

import json

import jsonschema
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from qserve import LLM, SamplingParams
from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from qserve.output_parsing.reasoning import REASONING_PARSERS, grammar_prefix
from qserve.server.tool_fields import Tool
from qserve.server.tool_use import NAMED, REQUIRED, ToolUse
from qserve.structured.grammar import grammar_text
from qserve.structured.params import StructuredOutputsParams

WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
CLOSED = {"type": "object", "additionalProperties": False}
SCHEMAS = {
    "weather": CLOSED
    | {
        "properties": {"city": WORD, "days": {"$ref": "#/$defs/days"}},
        "required": ["city", "days"],
        "$defs": {"days": {"enum": [1, 2, 3]}},
    },
    "search": CLOSED
    | {
        "properties": {"words": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3}},
        "required": ["words"],
    },
    "now": None,
}
TOOLS = tuple(
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
    for name, schema in SCHEMAS.items()
)


@pytest.fixture(scope="module")
def llm(docs_5m):
    return LLM(str(docs_5m), max_model_len=512, max_num_seqs=32, cpu_kv_cache_memory=0.2)


def texts(llm, form, count=8, max_tokens=120):
    params = [
        SamplingParams(structured_outputs=form, temperature=1.2, seed=seed, max_tokens=max_tokens)
        for seed in range(count)
    ]
    outputs = llm.generate(["Call a tool: "] * count, params, False)
    return [output.outputs[0] for output in outputs]


def check(name, arguments):
    jsonschema.validate(json.loads(arguments), SCHEMAS[name] or CLOSED)


@pytest.mark.parametrize("is_single", [False, True])
def test_required(llm, is_single):
    use = ToolUse(mode=REQUIRED, tools=TOOLS, is_single=is_single)
    settings = ParseSettings(is_required=True, tools=use.schemas)
    names, lengths = set(), set()
    for output in texts(llm, use.form()):
        found = Message.of(OutputParser(settings).parse(output.text), is_cut=False)
        complete = found.calls if output.finish_reason == "stop" else found.calls[:-1]
        for name, arguments in complete:
            check(name, arguments)
        assert not found.content
        names |= {name for name, _ in complete}
        lengths.add(len(complete))
    assert len(names) > 1 and (max(lengths) == 1) == is_single


def test_named(llm):
    for tool in TOOLS:
        use = ToolUse(mode=NAMED, tools=(tool,))
        outputs = texts(llm, use.form(), count=3)
        assert any(output.finish_reason == "stop" for output in outputs)
        for output in outputs:
            if output.finish_reason == "stop":
                check(use.named, output.text)


@pytest.mark.parametrize("name", list(REASONING_PARSERS))
@pytest.mark.parametrize("are_special", [False, True])
def test_the_grammar_of_reasoning(docs_5m, name, are_special):
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    if are_special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    form = REASONING_PARSERS[name]
    for before, may_think, must_think in (
        ("", True, form.is_implied),
        ("<think>\n", True, True),
        ("<think>\n\n</think>\n\n", False, False),
    ):
        prefix = grammar_prefix(form, before, are_special=are_special)
        params = StructuredOutputsParams(json={"type": "integer"}, prefix=prefix)
        start = "" if must_think else form.start
        texts = {f'{start} hm {{"a"}}\n no</think>\n\n12': may_think, "12": not must_think}
        for text, expected in texts.items():
            ids = tokenizer.encode(text, add_special_tokens=False)
            matcher = LLMatcher(from_tokenizer(tokenizer), grammar_text(params))
            num_taken = matcher.try_consume_tokens(ids)
            is_whole = num_taken == len(ids) and matcher.is_accepting()
            assert is_whole == expected, (before, text)


@pytest.mark.parametrize("name", list(REASONING_PARSERS))
def test_a_form_holds_behind_reasoning(llm, name):
    prefix = grammar_prefix(REASONING_PARSERS[name], "")
    form = StructuredOutputsParams(choice=("yes", "no"), prefix=prefix)
    settings = ParseSettings(reasoning_parser=name)
    for output in texts(llm, form, count=3, max_tokens=60):
        found = Message.of(OutputParser(settings).parse(output.text))
        assert found.content in ("yes", "no") or output.finish_reason == "length"
