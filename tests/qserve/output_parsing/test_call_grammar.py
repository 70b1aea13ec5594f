"""Grammars of calls in each format: what they take, and that the format's parser reads it."""

import functools
import json
from dataclasses import replace

import jsonschema
import pytest
from transformers import AutoTokenizer

from qserve import LLM, SamplingParams
from qserve.output_parsing.grammars.call_grammar import CallGrammar
from qserve.output_parsing.grammars.format_grammar import lark, lark_in_text
from qserve.output_parsing.grammars.markers import no_token
from qserve.output_parsing.grammars.reasoning_grammar import answer_opening, grammar_prefix
from qserve.output_parsing.grammars.text_grammar import Inexpressible
from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from qserve.structured.backend import library
from qserve.structured.grammar import grammar_text, json_rule
from qserve.structured.params import StructuredOutputsParams
from qserve.text.tokenizer import Tokenizer
from tests.qserve.output_parsing.written_calls import AT_START, ONE_CALL, WRITE

CLOSED = {"type": "object", "additionalProperties": False}
TOOLS = {
    "f": CLOSED
    | {
        "properties": {
            "city": {"type": "string", "pattern": "^[a-z]{1,6}$"},
            "days": {"$ref": "#/$defs/days"},
            "unit": {"enum": ["C", "F"]},
            "near": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        },
        "required": ["city"],
        "$defs": {"days": {"enum": [1, 2, 3]}},
    },
    "now": CLOSED | {"properties": {}},
    "any": {"type": "object"},
}
ANSWER = CLOSED | {"properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
FORM = StructuredOutputsParams(json=ANSWER)
MARKERS = [text for row in TOOL_PARSERS.values() for text in row.tokens]
MARKERS += ["<think>", "</think>", "<|python_start|>", "<|python_end|>"]
FINAL = "<|channel|>final<|message|>"


def form_of(
    name,
    *,
    tools=TOOLS,
    is_single=False,
    marker_token=no_token,
    rules=lark,
    free=("any",),
    **fields,
):
    opening = answer_opening(REASONING_PARSERS["gpt_oss"], marker_token)
    form = replace(FORM, opening=opening if name in ONE_CALL else "", **fields)
    grammar = CallGrammar(
        tools=tools,
        is_single=is_single,
        as_json=lambda schema: json_rule(form, schema),
        marker_token=marker_token,
        free=frozenset(free),
    )
    return replace(form, calls=rules(grammar, TOOL_PARSERS[name]))


@pytest.fixture(scope="module")
def plain(docs_5m):
    return AutoTokenizer.from_pretrained(docs_5m)


@pytest.fixture(scope="module")
def special(docs_5m):
    """Markers are special tokens, as those of Llama 4 and Mistral."""
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    return tokenizer


@functools.cache
def backend_of(tokenizer):
    return library().LLTokenizer(tokenizer.backend_tokenizer.to_str())


def takes(tokenizer, form, text):
    """True if a text, in the tokens of a model that writes it, is whole under the grammar."""
    matcher = library().LLMatcher(backend_of(tokenizer), grammar_text(form), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


F = {"city": "oslo", "days": 2, "unit": "C", "near": [1.5, 2]}
NOW = ("now", {})
NAMES = list(TOOL_PARSERS)


def written(name, *calls):
    return WRITE[name](list(calls))


def two_of(name):
    """Two calls, or one in formats of one."""
    return [("f", F)] if name in ONE_CALL else [("f", F), NOW]


@pytest.mark.parametrize("name", NAMES)
def test_grammar_allows_call_or_response_format(plain, name):
    form, single = form_of(name), form_of(name, is_single=True)
    one, two = written(name, ("f", F)), written(name, *two_of(name))
    opening = form.opening and FINAL
    assert takes(plain, form, f'{opening}{{"answer": "yes"}}') and takes(plain, form, one)
    assert takes(plain, form, two) and takes(plain, single, one)
    assert one == two or not takes(plain, single, two)
    wrong = [F | {"days": 4}, F | {"unit": "K"}, F | {"city": "oslo7"}, {"days": 1}, F | {"x": 1}]
    wrong = [written(name, ("f", each)) for each in wrong]
    wrong += [written(name, ("h", {})), written(name, ("now", {"a": "b"}))]
    for text in ("Well, yes.", '{"answer": "maybe"}', f'{{"answer": "yes"}}{one}', *wrong):
        assert not takes(plain, form, text), text
    settings = ParseSettings(tool_parser=name, tools=TOOLS)
    found = Message.of(OutputParser(settings).parse(two))
    assert [(n, json.loads(a)) for n, a in found.calls] == two_of(name)
    found = Message.of(OutputParser(settings).parse(f'{opening}{{"answer": "yes"}}'))
    assert found == Message(content='{"answer": "yes"}')


@pytest.mark.parametrize("name", NAMES)
def test_grammar_allows_calls_in_free_text(plain, special, name):
    """For strict tools that a model may call: any text, and calls that fit."""
    marker_token = token_of(special)
    for tokenizer, token in ((plain, lambda text: None), (special, marker_token)):
        form = form_of(name, tools=TOOLS, marker_token=token, rules=lark_in_text, only_calls=True)
        say = FINAL if name in ONE_CALL else ""
        assert takes(tokenizer, form, f"{say}Well, <b>yes</b>.")
        one = written_for(name, token, ("f", F))
        assert takes(tokenizer, form, one)
        wrong = written_for(name, token, ("f", F | {"days": 4}))
        assert not takes(tokenizer, form, wrong)
        if name not in ONE_CALL | AT_START | {"mistral"}:
            assert takes(tokenizer, form, f"Let me see.\n{one}\nDone.")
            assert not takes(tokenizer, form, f"Let me see.\n{wrong}")


def written_for(name, marker_token, *calls):
    """Calls as models with these tokens write them."""
    if marker_token("[ARGS]") is None:
        return written(name, *calls)
    each = [f"[TOOL_CALLS]{called}[ARGS]{json.dumps(args)}" for called, args in calls]
    return "".join(each) if name == "mistral" else written(name, *calls)


def token_of(tokenizer):
    """Tokens of the markers that are special in a tokenizer."""
    known = set(tokenizer.get_added_vocab())
    return lambda text: tokenizer.convert_tokens_to_ids(text) if text in known else None


@pytest.mark.parametrize("name", NAMES)
def test_special_token_markers(special, name):
    marker_token = token_of(special)
    form = form_of(name, marker_token=marker_token)
    one = written_for(name, marker_token, ("f", F))
    opening = form.opening and FINAL
    assert takes(special, form, one) and takes(special, form, f'{opening}{{"answer": "no"}}')
    assert not takes(special, form, one + "x")
    if name in ("llama3_json", "pythonic"):
        start, end = {"llama3_json": ("<|python_tag|>", ""), "pythonic": MARKERS[-2:]}[name]
        assert takes(special, form, f"{start}{one}{end}")


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "glm45", "deepseek_v32", "step3"])
def test_bare_texts_match_schemas(plain, name):
    """Patterns, lengths, formats and constants hold; a text has no tags of the format."""
    schemas = {
        "a": ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ["AB-12"], ["AB-", "ab-1"]),
        "b": ({"type": "string", "minLength": 2, "maxLength": 3}, ["éé", "abc"], ["a", "abcd"]),
        "c": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "today"]),
        "d": ({"enum": ["x y", 7, None]}, ["x y", 7, None], ["x", 8]),
        "e": ({"type": ["string", "integer"], "maxLength": 3}, ["six", 6], ["seven"]),
        "f": ({"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/w"}]}, [True, "w"], ["v"]),
        "g": ({"type": "string"}, ["</b> <i>", "", " 1\n"], ["</parameter", "<tool_call>"]),
    }  # fmt: skip
    for key, (schema, right, wrong) in schemas.items():
        tools = {
            "f": CLOSED
            | {"properties": {key: schema}, "required": [key], "$defs": {"w": {"const": "w"}}}
        }
        form = form_of(name, tools=tools)
        for value in right:
            text = written(name, ("f", {key: value}))
            assert takes(plain, form, text), text
            settings = ParseSettings(tool_parser=name, tools=tools)
            ((_, arguments),) = Message.of(OutputParser(settings).parse(text)).calls
            assert json.loads(arguments) == {key: value}
        if key == "g" and name != "qwen3_coder":
            continue
        for value in wrong:
            assert not takes(plain, form, written(name, ("f", {key: value}))), value


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "gemma4"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
        {"type": "object", "properties": {"a b<": {"type": "string"}}},
    ],
)
def test_inexpressible_schemas_are_refused(name, schema):
    with pytest.raises(Inexpressible):
        form_of(name, tools={"f": schema})


def test_nonspecial_added_token_markers(docs_5m, tmp_path):
    """Qwen's <tool_call> is one token, and an ordinary one."""
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(tmp_path)
    form = form_of("hermes", marker_token=Tokenizer(tmp_path).marker_token)
    assert takes(tokenizer, form, written("hermes", ("f", F), NOW))


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_comes_first(plain, name):
    prefix = grammar_prefix(REASONING_PARSERS["qwen3"], "")
    form = form_of(name, prefix=prefix)
    opening = form.opening and FINAL
    for text in (written(name, ("f", F)), f'{opening}{{"answer": "no"}}'):
        assert takes(plain, form, f"<think>Hm. {text}</think>\n\n{text}")
        assert takes(plain, form, text)
    assert not takes(plain, form, "<think>Hm.</think>Well.")


@pytest.mark.parametrize(
    "fields",
    [
        {"json": None, "json_object": True},
        {"json": None, "regex": "yes|no"},
        {"json": None, "choice": ("yes", "no")},
        {"json": None, "grammar": 'start: "yes" | "no"'},
    ],
)
def test_other_response_formats(plain, fields):
    form = form_of("hermes", **fields)
    content = "{}" if "json_object" in fields else "yes"
    assert takes(plain, form, content) and takes(plain, form, written("hermes", ("f", F)))
    assert not takes(plain, form, "Well.")


@pytest.mark.exhaustive
def test_grammar_outputs_are_parsed(docs_5m):
    """A model that knows no tools, at random: calls fit their schemas, or the content the form."""
    llm = LLM(str(docs_5m), max_model_len=256, max_num_seqs=32, cpu_kv_cache_memory=0.1)
    days = CLOSED | {"properties": {"n": {"enum": [1, 2]}, "exact": {"type": "boolean"}}}
    tools = {"days": days | {"required": ["n"]}, "now": TOOLS["now"]}
    names = [name for name in TOOL_PARSERS for _ in range(6)]
    params = [
        SamplingParams(
            structured_outputs=form_of(name, tools=tools),
            temperature=2.0,
            seed=seed,
            max_tokens=200,
        )
        for seed, name in enumerate(names)
    ]
    num_calls, num_answers = dict.fromkeys(names, 0), 0
    outputs = llm.generate(["Call a tool: "] * len(names), params, False)
    for name, output in zip(names, outputs, strict=True):
        (whole,) = output.outputs
        is_cut = whole.finish_reason == "length"
        settings = ParseSettings(tool_parser=name, tools=tools)
        found = Message.of(OutputParser(settings).parse(whole.text, is_cut=is_cut))
        for called, arguments in found.calls[: -1 if is_cut else None]:
            jsonschema.validate(json.loads(arguments), tools[called])
            num_calls[name] += 1
        if not found.calls and not is_cut:
            jsonschema.validate(json.loads(found.content), ANSWER)
            num_answers += 1
    assert num_answers and sum(map(bool, num_calls.values())) > 1, num_calls
