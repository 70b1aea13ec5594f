"""Calls whose ends or separators are wrong: each loses itself at most, however the text comes."""

import json
import random

import pytest

from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from qserve.output_parsing.pieces import merged
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from tests.qserve.output_parsing.written_calls import WRITE

TOOLS = {
    "f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
    "g": {"properties": {"x": {"type": "integer"}}},
}
NEXT = "<tool_call>\n<function=g>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
G = ("g", {"x": 1})


def coder(value, end="\n</parameter>\n</function>\n</tool_call>", key="a"):
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}{end}"


def pieces_of(settings, texts):
    parser, found = OutputParser(settings), []
    for text in texts:
        found += parser.push(text)
    return merged(found + parser.finish())


def cuts(text, generator):
    while text:
        size = generator.randint(1, 12)
        yield text[:size]
        text = text[size:]


def parsed(name, text, tools=TOOLS):
    """The message; the same however the text is cut, and what its prefixes say is never lost."""
    settings = ParseSettings(tool_parser=name, tools=tools)
    whole = pieces_of(settings, [text])
    generator = random.Random(text)
    for _ in range(8):
        assert pieces_of(settings, cuts(text, generator)) == whole
    assert pieces_of(settings, text) == whole
    return Message.of(whole)


def calls_of(found):
    return [(name, json.loads(arguments)) for name, arguments in found.calls]


CODER_ENDS = [
    "\n</parameter>\n</function>\n</tool_call>",
    "\n</param>\n</function>\n</tool_call>",
    "\n</paramter>\n</function>\n</tool_call>",
    "\n</parameter\n</function>\n</tool_call>",
    "\n</parameter=a>\n</function>\n</tool_call>",
    "\n</a>\n</function>\n</tool_call>",
    "\n</function>\n</tool_call>",
    "\n</functon>\n</tool_call>",
    "\n</parameter>\n</tool_call>",
    "\n</parameter>\n</functions>\n</tool_calls>",
    "\n</parameter>\n</function>",
    "\n</parameter>",
    "\n</tool_call>",
    "</function></tool_call>",
    "",
]


@pytest.mark.parametrize("end", CODER_ENDS)
@pytest.mark.parametrize("key", ["a", "b"])
def test_qwen3_coder_invalid_end_tags(end, key):
    """Every wrong end of the last parameter keeps its value, and the next call."""
    end = end.replace("=a", f"={key}").replace("/a", f"/{key}")
    found = parsed("qwen3_coder", f"Hm.\n{coder(7, end, key)}\n{NEXT}")
    assert calls_of(found) == [("f", {key: "7" if key == "a" else 7}), G]
    assert found.content == "Hm."


@pytest.mark.parametrize(
    "text",
    [
        "a </parameter> b",
        "</parameter>",
        "see </function> and </tool_call> there",
        "</function>\n</tool_call>\nthen",
        "</function></function>",
        "</tool_call>",
        "<parameter=a>\n1",
        "<parameter=other>\n1\n</parameter>",
        "<tool_call>\n<function=unknown>",
        "if a < b:\n    </par",
        "<a href='x'>\n</a> \n",
        "  \n\n",
        "<tool_call>",
        "f(<function=g>)",
    ],
)
def test_tags_in_content_are_kept(text):
    found = parsed("qwen3_coder", f"{coder(text)}\n{NEXT}")
    assert calls_of(found) == [("f", {"a": text}), G]
    assert not found.content


def test_parameter_without_an_end_before_the_next():
    text = (
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=b>\n2\n</function>\n</tool_call>"
    )
    assert calls_of(parsed("qwen3_coder", text)) == [("f", {"a": "x", "b": 2})]


@pytest.mark.parametrize("opening", ["", "<tool_call>\n"])
def test_calls_without_their_outer_tags(opening):
    text = f"{opening}<function=f>\n<parameter=a>\nx\n</function>\n<function=g>\n</function>"
    assert calls_of(parsed("qwen3_coder", text)) == [("f", {"a": "x"}), ("g", {})]


def test_broken_call_is_content_and_the_next_is_read():
    for broken in (
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f>\nplain",
        coder("x", "\n</parameter>\n<parameter=a>\n"),
    ):
        found = parsed("qwen3_coder", f"{broken}\n{NEXT}")
        assert calls_of(found) == [G] and found.content.startswith(broken.strip()[:20])


F_JSON = '{"name": "f", "arguments": {"a": "x"}}'
G_JSON = '{"name": "g", "arguments": {"x": 1}}'
F = ("f", {"a": "x"})
SEPARATORS = ["; ", ";", ";\n", "\n", " ", "", ",", ", ", ",\n", "\n\n", ";;", ", ;\r\n"]


@pytest.mark.parametrize("between", SEPARATORS)
@pytest.mark.parametrize("behind", ["", ";", ",\n", "\n", " "])
def test_separators_between_calls(between, behind):
    for tag in ("", "<|python_tag|>"):
        found = parsed("llama3_json", f"{tag}{F_JSON}{between}{G_JSON}{behind}")
        assert (calls_of(found), found.content) == ([F, G], "")
    for start, end in (("[", "]"), ("<|python_start|>[", "]<|python_end|>")):
        found = parsed("pythonic", f"{start}f(a='x'){between}g(x=1){behind}{end}")
        assert (calls_of(found), found.content) == ([F, G], "")
    found = parsed("pythonic", f"[f(a='x',)]{between}[g(x=1)]{behind}")
    assert (calls_of(found), found.content) == ([F, G], "")
    found = parsed(
        "hermes", f"<tool_call>\n{F_JSON}{between.replace(';', ',')}{G_JSON}</tool_call>"
    )
    assert (calls_of(found), found.content) == ([F, G], "")
    found = parsed("mistral", f"[TOOL_CALLS] [{F_JSON}{between.replace(';', ',')}{G_JSON}, ]")
    assert (calls_of(found), found.content) == ([F, G], "")


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_text_between_and_after_calls_is_content(name):
    one, two = (F_JSON, G_JSON) if name == "llama3_json" else ("[f(a='x')]", "[g(x=1)]")
    found = parsed(name, f"{one}\nAnd then:\n{two}\nDone; [1], {{}}.")
    assert calls_of(found) == [F, G]
    assert found.content == "\nAnd then:\nDone; [1], {}."


OPEN = '{"name": "f", "arguments": {"a": "x}}'  # its string has no end
TAGS = "<tool_call>\n{}\n</tool_call>"
# format, the text of a wrong call, the next call, whether the first is read all the same
WRONG = [
    ("hermes", TAGS.format(OPEN), TAGS.format(G_JSON), False),
    ("hermes", TAGS.format(F_JSON[:-1]), TAGS.format(G_JSON), True),
    ("hermes", TAGS.format(F_JSON + "}"), TAGS.format(G_JSON), True),
    ("hermes", TAGS.format(F_JSON[:-2] + ",}}"), TAGS.format(G_JSON), True),
    ("hermes", TAGS.format("oops"), TAGS.format(G_JSON), False),
    ("hermes", f"<tool_call>{F_JSON}", TAGS.format(G_JSON), True),
    ("hermes", "<tool_call>", TAGS.format(G_JSON), False),
    ("llama3_json", OPEN, f"\n{G_JSON}", False),
    ("llama3_json", OPEN, f"; {G_JSON}", False),
    ("llama3_json", F_JSON[:-1], f"\n{G_JSON}", True),
    ("llama3_json", F_JSON + "}", f"; {G_JSON}", True),
    ("llama3_json", '{"name": "f", "arguments": {"a": oops}}', f"\n{G_JSON}", False),
    ("mistral", f"[TOOL_CALLS] [{OPEN}", f", {G_JSON}]", False),
    ("mistral", f"[TOOL_CALLS] [{F_JSON[:-1]}", f", {G_JSON}]", True),
    ("mistral", f"[TOOL_CALLS] [{F_JSON}", f"[TOOL_CALLS] [{G_JSON}]", True),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x}', '[TOOL_CALLS]g[ARGS]{"x": 1}', False),
    ("pythonic", "[f(a='x)", ", g(x=1)]", False),
    ("pythonic", "[f(a='x)", ",\ng(x=1)]", False),
    ("pythonic", "[f(a='x)", "]\n[g(x=1)]", False),
    ("pythonic", "[f(a='x')", "\n[g(x=1)]", True),
]


@pytest.mark.parametrize(("name", "wrong", "following", "is_read"), WRONG)
def test_invalid_end_tag_loses_at_most_its_call(name, wrong, following, is_read):
    found = parsed(name, wrong + following)
    assert calls_of(found) == [F] * is_read + [G]
    if not is_read:
        assert "f" in found.content or "oops" in found.content or "<tool_call>" in found.content


def test_markers_in_arguments_do_not_start_calls():
    text = f"{TAGS.format(G_JSON)} [TOOL_CALLS]g{{}} ), g(x=1), <function=g>"
    for name, written in (
        ("hermes", TAGS.format(json.dumps({"name": "f", "arguments": {"a": text}}))),
        ("llama3_json", json.dumps({"name": "f", "parameters": {"a": text}})),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{json.dumps({'a': text})}"),
        ("pythonic", f"[f(a={text!r})]"),
    ):
        assert calls_of(parsed(name, written)) == [("f", {"a": text})]
        for end in range(len(written) - len(text), written.rindex("=g>"), 5):
            # cut short, the text is still no call
            settings = ParseSettings(tool_parser=name, tools=TOOLS)
            found = Message.of(OutputParser(settings).parse(written[:end], is_cut=True))
            assert [each for each, _ in found.calls] == ["f"] and not found.content, written[:end]


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_adversarial_texts_are_linear(name):
    unit = {
        "hermes": '<tool_call>{"a": "',
        "llama3_json": '\n{"name": "f", "parameters": {"a": "',
        "mistral": '[TOOL_CALLS]f[ARGS]{"a": "',
        "pythonic": "[f(a='x), ",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n</function></tool_call> ",
    }.get(name) or f"{WRITE[name]([('f', {'a': 'x'})]).partition('x')[0]}x "
    for text in (unit * 100, unit + " " * 9000 + "x", unit + ")" + "\n" * 9000 + "x"):
        settings = ParseSettings(tool_parser=name, tools=TOOLS)
        found = Message.of(OutputParser(settings).parse(text))
        assert found.content.strip() or found.calls


def test_python_triple_quoted_string():
    text = '''[f(a="""x = 'y'\n"z" ""\n""", b=0x10), g(x=1)]'''
    found = parsed("pythonic", text)
    assert calls_of(found) == [("f", {"a": 'x = \'y\'\n"z" ""\n', "b": 16}), G]


def test_malformed_json_of_models_is_read():
    text = '<tool_call>{"name": "f", "arguments": {"a": "1\n", "b": [True, None,], }}</tool_call>'
    assert calls_of(parsed("hermes", text)) == [("f", {"a": "1\n", "b": [True, None]})]


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("hermes", TAGS.format(G_JSON), "\n" + TAGS.format(F_JSON)),
        ("llama3_json", G_JSON, f"; {F_JSON}"),
        ("mistral", f"[TOOL_CALLS] [{G_JSON}", f", {F_JSON}]"),
        ("pythonic", "[g(x=1)", ", f(a='x')]"),
        ("qwen3_coder", NEXT, "\n" + coder("x")),
    ],
)
def test_truncated_text_after_a_call_is_not_content(name, one, two):
    for end in range(len(two)):
        settings = ParseSettings(tool_parser=name, tools=TOOLS)
        pieces = OutputParser(settings).parse(one + two[:end], is_cut=True)
        found = Message.of(pieces)
        assert not found.content and calls_of(Message.of(pieces[:2])) == [G]
        assert [each for each, _ in found.calls] in (["g"], ["g", "f"])
