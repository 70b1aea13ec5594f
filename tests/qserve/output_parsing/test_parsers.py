"""Calls and reasoning in single texts: what is found, however the text is cut."""

import json

import pytest

from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from qserve.output_parsing.pieces import ARGUMENTS, merged
from qserve.output_parsing.reasoning import MAX_SPACE
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS

TOOLS = {
    "f": {
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "integer"},
            "c": {"type": "array"},
            "d": {"type": ["string", "null"]},
            "e": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
        }
    },
    "g": {},
}
VALUE = {"a": 'x}\\"]</b', "b": [1, -2.5e3, {"k": [None, True]}], "c": "é\n"}
TEXT = json.dumps(VALUE)
HERMES = f'<tool_call>\n{{"name": "f", "arguments": {TEXT}}}\n</tool_call>'
CODER = """<tool_call>
<function=f>
<parameter=a>
if a < b:
  </param

</parameter>
<parameter=b>
42
</parameter>
<parameter=c>[1, {"k": null}]</parameter>
<parameter=d>
null
</parameter>
<parameter=e>
true
</parameter>
<parameter=other>
1
</parameter>
</function>
</tool_call>"""
CODED = {"a": "if a < b:\n  </param\n", "b": 42, "c": [1, {"k": None}], "d": None, "e": True}
PYTHON = r"""[f(a='it\'s "é\u00e9"', b=-3, c=[1, (True, None,), {'k': 1.5e1}]), g()]"""
PYTHON_VALUE = {"a": 'it\'s "éé"', "b": -3, "c": [1, [True, None], {"k": 15.0}]}

# format: text, content, calls
CASES = [
    ("hermes", f"Hm. {HERMES}\n{HERMES} \n", "Hm.", [("f", VALUE)] * 2),
    ("hermes", f"{HERMES}\n done", "\n done", [("f", VALUE)]),
    ("hermes", HERMES.removesuffix("</tool_call>"), "", [("f", VALUE)]),
    ("hermes", '<tool_call>{"arguments": {}, "id": [1], "name": "new"}', "", [("new", {})]),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', "", [("g", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n\t"}}', "",
     [("f", {"a": "1\n\t"})]),
    ("hermes", "a <tool_cal <b>  ", None, []),
    ("hermes", "<tool_call>", None, []),
    ("hermes", "<tool_call> \n hello", None, []),
    ("hermes", '<tool_call>{"name": 3}', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}} and on', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a" 1}}', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', None, []),
    ("hermes", f"<tool_call> <tool_call{HERMES}", "<tool_call> <tool_call", [("f", VALUE)]),
    ("llama3_json", f' {{"name": "f", "parameters": {TEXT}}}', "", [("f", VALUE)]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "",
     [("f", {}), ("g", {})]),
    ("llama3_json", '<|python_tag|>{"name": "g", "arguments": {}}', "", [("g", {})]),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', None, []),
    ("llama3_json", '{"name": "f", "age": 3}', None, []),
    ("llama3_json", '{"name": "g", "parameters": {}}; then', "; then", [("g", {})]),
    ("llama3_json", 'See {"name": "f", "parameters": {}}', None, []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {TEXT}, "id": "abcdefghi"}},'
     ' {"name": "g", "arguments": {}}]', "", [("f", VALUE), ("g", {})]),
    ("mistral", f"Hm [TOOL_CALLS]f[ARGS]{TEXT}[TOOL_CALLS]g{{}}", "Hm", [("f", VALUE), ("g", {})]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "", [("f", {})]),
    ("mistral", "[TOOL_CALLS] nothing", None, []),
    ("mistral", "[TOOL_CALLS]f[ODD]{}", None, []),
    ("pythonic", PYTHON, "", [("f", PYTHON_VALUE), ("g", {})]),
    ("pythonic", f"<|python_start|>{PYTHON}<|python_end|>", "", [("f", PYTHON_VALUE), ("g", {})]),
    ("pythonic", "[1, 2, 3]", None, []),
    ("pythonic", "[h(a=1)]", None, []),
    ("pythonic", "[f(1)]", None, []),
    ("pythonic", "[f(a=open('x'))]", None, []),
    ("pythonic", "[f(a=1, a=2)]", None, []),
    ("pythonic", "[f(a=1e999)]", None, []),
    ("pythonic", "[f(a='x", None, []),
    ("qwen3_coder", f"Sure.\n{CODER}", "Sure.", [("f", CODED | {"other": "1"})]),
    ("qwen3_coder", "<function=g>\n</function>\n</tool_call>", "", [("g", {})]),
    ("qwen3_coder", "<function=g><parameter=x></parameter></function>", "", [("g", {"x": ""})]),
    ("qwen3_coder", "<tool_call>\n<function=g>\n<param>", None, []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx</param", None, []),
]  # fmt: skip


def pieces_of(settings, *texts):
    parser, found = OutputParser(settings), []
    for text in texts:
        found += parser.push(text)
    return merged(found + parser.finish())


def check_cuts(settings, text):
    whole = pieces_of(settings, text)
    for at in range(len(text)):
        assert pieces_of(settings, text[:at], text[at:]) == whole, text[:at]
    assert pieces_of(settings, *text) == whole
    assert OutputParser(settings).parse(text) == whole
    return Message.of(whole)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_of_every_parser(name, text, content, calls):
    """content None: all of the text."""
    found = check_cuts(ParseSettings(tool_parser=name, tools=TOOLS), text)
    assert found.content == (text if content is None else content)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls


@pytest.mark.parametrize("name", sorted({name for name, *_ in CASES}))
def test_every_prefix_of_a_call_is_parsed_without_loss(name):
    """Nothing is lost or said twice where an output ends early."""
    settings = ParseSettings(tool_parser=name, tools=TOOLS)
    text = next(text for each, text, _, calls in CASES if each == name and calls)
    for end in range(len(text)):
        found = Message.of(pieces_of(settings, text[:end]))
        for _, arguments in found.calls:
            json.loads(arguments)
        if not found.calls:
            assert found.content == text[:end]


def test_arguments_are_streamed():
    parser = OutputParser(ParseSettings(tool_parser="hermes"))
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "x')
    assert [(piece.kind, piece.text) for piece in parser.push("yz")] == [(ARGUMENTS, "yz")]


@pytest.mark.exhaustive
def test_long_texts_without_calls_are_linear():
    """A backtracking regular expression would take quadratic time on these texts."""
    for name, text in (
        ("pythonic", "[" + "f(" * 20_000),
        ("hermes", "<tool_call" * 10_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 20_000),
        ("qwen3_coder", "<function=f><parameter=a>" + "</parameter" * 10_000),
    ):
        settings = ParseSettings(tool_parser=name, tools=TOOLS)
        assert Message.of(pieces_of(settings, text)).content == text


# parser, the prompt's end, text, reasoning, content
REASONING = [
    ("qwen3", "", "<think>\nhm </th so\n</think>\n\nYes. ", "hm </th so", "Yes. "),
    ("qwen3", "<think>\n", "\nhm\n\nwell</think>Yes", "hm\n\nwell", "Yes"),
    ("qwen3", "<think>\n\n</think>\n\n", "\n<think>", "", "<think>"),
    ("qwen3", "", " <thin ice>", "", " <thin ice>"),
    ("qwen3", "", "<think>never ends <", "never ends <", ""),
    ("qwen3", "", "", "", ""),
    ("qwen3", "", "\n" * MAX_SPACE + "<think>hm</think>Yes", "hm", "Yes"),
    ("qwen3", "", "\n" * (MAX_SPACE + 1) + "<think>", "", "\n" * (MAX_SPACE + 1) + "<think>"),
    ("deepseek_r1", "", "hm</think>\nYes", "hm", "Yes"),
    ("deepseek_r1", "<think>\n", "<think>hm</think></think>Yes", "hm", "</think>Yes"),
    ("deepseek_r1", "", "never ends </thi ", "never ends </thi", ""),
    ("deepseek_r1", "</think>", "Yes", "", "Yes"),
]


@pytest.mark.parametrize(("name", "prompt_end", "text", "reasoning", "content"), REASONING)
def test_reasoning(name, prompt_end, text, reasoning, content):
    found = check_cuts(ParseSettings(reasoning_parser=name, prompt_end=prompt_end), text)
    assert (found.reasoning.rstrip(), found.content) == (reasoning, content)


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_whitespace_is_not_buffered_forever(name):
    """A weak model writes nothing else; what it writes is shown as it comes."""
    parser = OutputParser(ParseSettings(reasoning_parser=name))
    emitted = sum(len(piece.text) for _ in range(100_000) for piece in parser.push("\n"))
    form = REASONING_PARSERS[name]  # else it may precede reasoning, and is held back
    is_content = not form.is_implied and not form.is_harmony
    assert emitted == 100_000 * is_content


def test_calls_after_reasoning():
    settings = ParseSettings(tool_parser="hermes", tools=TOOLS, reasoning_parser="qwen3")
    found = check_cuts(settings, f"<think>{HERMES}</think>\n{HERMES}")
    assert found.reasoning == HERMES and found.content == "" and len(found.calls) == 1
