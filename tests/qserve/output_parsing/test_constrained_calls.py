"""Calls that are required: what a model writes under their grammar is one, or is cut short."""

import json

import jsonschema
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from qserve import LLM, SamplingParams
from qserve.output_parsing.grammars.reasoning_grammar import answer_opening, grammar_prefix
from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from qserve.server.requests.served_model import ServedModel
from qserve.server.requests.tool_fields import Tool
from qserve.server.requests.tool_use import NAMED, REQUIRED, ToolUse
from qserve.structured.grammar import grammar_text
from qserve.structured.params import StructuredOutputsParams
from qserve.text.tokenizer import Tokenizer

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


@pytest.fixture(scope="module")
def served(docs_5m):
    """A model that writes calls in a format, or in none that is known."""
    tokenizer = Tokenizer(docs_5m)
    facts = {"names": ("m",), "defaults": {}, "max_model_len": 512, "vocab_size": 8192}
    return lambda parser: ServedModel(tokenizer=tokenizer, auto_tool_parser=parser, **facts)


def texts(llm, form, count=8, max_tokens=120):
    params = [
        SamplingParams(structured_outputs=form, temperature=1.2, seed=seed, max_tokens=max_tokens)
        for seed in range(count)
    ]
    outputs = llm.generate(["Call a tool: "] * count, params, False)
    return [output.outputs[0] for output in outputs]


def check(name, arguments):
    jsonschema.validate(json.loads(arguments), SCHEMAS[name] or CLOSED)


MORE = ["hermes", "glm45", "gemma4", "kimi_k2", "deepseek_v32", "cohere_command4"]
FORCED = [(None, False), (None, True), ("qwen3_coder", False), ("olmo3", True)]
FORCED += [pytest.param(name, False, marks=pytest.mark.exhaustive) for name in MORE]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("parser", "is_single"), FORCED)
def test_required_tool_choice(llm, served, parser, is_single):
    use = ToolUse(mode=REQUIRED, tools=TOOLS, is_single=is_single)
    settings = ParseSettings(tool_parser=parser, is_required=True, tools=use.schemas)
    form = use.form(served(parser))
    assert form.only_calls == (parser is not None)
    names, lengths = set(), set()
    for output in texts(llm, form):
        is_cut = output.finish_reason == "length"
        found = Message.of(OutputParser(settings).parse(output.text, is_cut=is_cut))
        complete = found.calls[:-1] if is_cut else found.calls
        for name, arguments in complete:
            check(name, arguments)
        assert not found.content and (complete or is_cut)
        names |= {name for name, _ in complete}
        lengths.add(len(complete))
    assert names and (max(lengths) <= 1 or not is_single)


@pytest.mark.exhaustive
@pytest.mark.parametrize("parser", [None, "minimax_m2"])
def test_named_tool_choice(llm, served, parser):
    for tool in TOOLS:
        use = ToolUse(mode=NAMED, tools=(tool,))
        outputs = texts(llm, use.form(served(parser)), count=3)
        assert any(output.finish_reason == "stop" for output in outputs)
        settings = ParseSettings(tool_parser=parser, named=use.named, tools=use.schemas)
        for output in outputs:
            if output.finish_reason == "stop":
                ((name, arguments),) = Message.of(OutputParser(settings).parse(output.text)).calls
                assert name == use.named
                check(name, arguments)


WRITES_JSON = ("hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2")
WRITES_JSON += ("gpt_oss", "granite", "phi4_mini", "hunyuan", "ernie45", "xlam")
WRITES_JSON += ("cohere_command3", "cohere_command4")


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_every_format_is_forced_or_json(served, name):
    """Schemas that a format cannot write are forced as JSON, all others in the format."""
    use = ToolUse(mode=REQUIRED, tools=TOOLS)
    assert use.form(served(name)).only_calls
    fields = {"type": "object", "properties": {"a": {}}, "minProperties": 1}
    function = {"name": "odd", "parameters": fields}
    odd = Tool.model_validate({"type": "function", "function": function})
    form = ToolUse(mode=REQUIRED, tools=(odd,)).form(served(name))
    assert form.only_calls == (name in WRITES_JSON)


@pytest.mark.parametrize(
    "name", ["deepseek_r1", "qwen3", "mistral", "gemma4", "granite", "gpt_oss"]
)
@pytest.mark.parametrize("tokens", ["none", "special", "ordinary"])
def test_grammar_of_reasoning(docs_5m, tmp_path, name, tokens):
    """The markers are texts, special tokens, or tokens that are not special, as Qwen's."""
    form = REASONING_PARSERS[name]
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    if tokens != "none":
        tokenizer.add_tokens(list(form.tokens), special_tokens=tokens == "special")
    tokenizer.save_pretrained(tmp_path)
    marker_token = Tokenizer(tmp_path).marker_token
    after = "<|start|>assistant" if form.is_harmony else ""
    answer = "<|channel|>final<|message|>" if form.is_harmony else ""
    for before, may_think, must_think in (
        ("", True, form.is_implied),
        (f"{form.start}\n", True, True),
        (f"{form.start}\n\n{form.end}\n\n", False, False),
    ):
        prefix = grammar_prefix(form, before, marker_token=marker_token)
        opening = answer_opening(form, marker_token)
        params = StructuredOutputsParams(json={"type": "integer"}, prefix=prefix, opening=opening)
        start = "" if must_think else form.start
        space = "" if form.is_harmony else "\n\n"
        thought = f'{start} hm {{"a"}}\n no{form.end}{after}{space}'
        texts = {f"{thought}{answer}12": may_think, f"{answer}12": not must_think}
        for text, expected in texts.items():
            ids = tokenizer.encode(text, add_special_tokens=False)
            matcher = LLMatcher(from_tokenizer(tokenizer), grammar_text(params), log_level=0)
            num_taken = matcher.try_consume_tokens(ids)
            is_whole = num_taken == len(ids) and matcher.is_accepting()
            assert is_whole == expected, (before, text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "gpt_oss"])
def test_response_format_applies_after_reasoning(llm, name):
    prefix = grammar_prefix(REASONING_PARSERS[name], "")
    opening = answer_opening(REASONING_PARSERS[name])
    form = StructuredOutputsParams(choice=("yes", "no"), prefix=prefix, opening=opening)
    settings = ParseSettings(reasoning_parser=name)
    for output in texts(llm, form, count=3, max_tokens=60):
        found = Message.of(OutputParser(settings).parse(output.text))
        assert found.content in ("yes", "no") or output.finish_reason == "length"
