"""Faults that other servers' parsers had in 2026, each with the text that shows it."""

import json

import pytest

from qserve.output_parsing.output_parser import Message, ParseSettings
from tests.qserve.output_parsing.test_formats import calls_of, parsed, pieces_of
from tests.qserve.output_parsing.written_calls import TOOLS, WRITE, kimi

CITY = ("get_weather", {"city": "Oslo"})
NOW = ("now", {})
RUN = ("functions-2.run", {"command": "x"})


def whole(name, text, **fields):
    found = parsed(name, text, **fields)
    return found.reasoning, found.content, calls_of(found)


def test_number_is_converted_at_the_end_of_its_value():
    """vLLM 48702, 33916: the rest of the arguments was lost."""
    calls = [("get_weather", {"city": "3", "days": 42, "code": "0"})]
    for name in ("qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "step3", "mistral"):
        assert whole(name, WRITE[name](calls)) == ("", "", calls)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "granite"])
def test_cut_opening_tag_is_content(name):
    """vLLM 47137: streamed and whole results differed."""
    assert whole(name, "Hm. <tool_call") == ("", "Hm. <tool_call", [])


def test_end_tag_inside_of_a_value():
    """vLLM 45167, 45310, 55848."""
    for name in ("hermes", "qwen3_coder", "glm45", "kimi_k2"):
        calls = [
            ("get_weather", {"city": "say </tool_call> and </arg_value> or <|tool_call_end|>"})
        ]
        assert whole(name, WRITE[name](calls)) == ("", "", calls)


def test_calls_without_arguments_before_others():
    """vLLM 47901, for xlam and hunyuan: the next call's arguments were lost."""
    for name in ("xlam", "hunyuan", "granite", "phi4_mini"):
        text = WRITE[name]([NOW, CITY]).replace(', "arguments": {}', "")
        assert '"now"}' in text and whole(name, text) == ("", "", [NOW, CITY])


def test_kimi_with_odd_ids():
    """vLLM 38579: line breaks in ids, long arguments, an end and a start in one piece."""
    text = kimi([RUN]).replace(":0", ":0\n").replace("x", "x" * 10_000)
    settings = ParseSettings(tool_parser="kimi_k2", tools=TOOLS)
    (call,) = Message.of(pieces_of(settings, [text])).calls
    assert call[0] == RUN[0] and len(call[1]) > 10_000
    assert whole("kimi_k2", kimi([CITY, RUN])) == ("", "", [CITY, RUN])
    assert whole("kimi_k2", kimi([CITY]).replace("functions.", "")) == ("", "", [CITY])


def test_gemma_with_quotes_and_two_calls():
    """vLLM 38946, 44522, 42696, 57231."""
    calls = [("get_weather", {"city": 'a "b", c:{d}[e]<|', "days": 2}), NOW, CITY]
    assert whole("gemma4", WRITE["gemma4"](calls)) == ("", "", calls)
    text = '<|tool_call>call:get_weather{"city":"Oslo",days:<|"|>3<|"|>,code:7}<tool_call|>'
    expected = [("get_weather", {"city": "Oslo", "days": 3, "code": "7"})]
    assert whole("gemma4", text) == ("", "", expected)


def test_white_space_between_calls_is_no_content():
    """SGLang 24293."""
    for name in ("minimax_m2", "kimi_k2", "deepseek_v31", "step3", "olmo3"):
        text = WRITE[name]([CITY, RUN if name != "olmo3" else NOW])
        for mark in ("<invoke", "<|tool_call_begin", "<｜tool▁call▁begin", "<｜tool_call_begin"):
            text = text.replace(mark, f" \n\n{mark}")
        assert whole(name, text + "\n")[1:] == ("", [CITY, RUN if name != "olmo3" else NOW])


def test_marker_of_deepseek_in_a_command():
    """vLLM 40800, 45877: an end tag after `2>&1`, and markers in several pieces."""
    calls = [("functions-2.run", {"command": "make 2>&1"}), CITY]
    assert whole("deepseek_v32", WRITE["deepseek_v32"](calls)) == ("", "", calls)


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax_m2", "step3"])
def test_opening_tag_is_missing(name):
    """vLLM 58227: calls of a tool that exists are read; other text with such tags is text."""
    text = WRITE[name]([CITY])
    start = text.index({"minimax_m2": "<invoke", "step3": "<steptml:invoke"}.get(name, "<function"))
    assert whole(name, text[start:]) == ("", "", [CITY])
    text = WRITE[name]([("unknown", {"a": "b"})])[start:]
    assert whole(name, text)[2] == []


def test_call_inside_of_unclosed_reasoning():
    """vLLM 39056, 55759: it was lost. One in the middle of reasoning is reasoning."""
    call = WRITE["hermes"]([CITY])
    fields = {"reasoning_parser": "qwen3", "prompt_end": "<think>\n"}
    assert whole("hermes", f"I call it.\n{call}\n", **fields) == ("I call it.", "", [CITY])
    assert whole("hermes", f"Hm {call} no.</think>Yes", **fields) == (f"Hm {call} no.", "Yes", [])
    assert whole("hermes", f"<tool_call> is a tag {call}", **fields)[2] == [CITY]
    cut = Message.of(
        pieces_of(
            ParseSettings(tool_parser="hermes", tools=TOOLS, **fields),
            [f"Hm.{call[:-18]}"],
            is_cut=True,
        )
    )
    assert cut.reasoning == "Hm." and cut.calls[0][0] == "get_weather"


def test_call_of_kimi_ends_reasoning():
    fields = {"reasoning_parser": "kimi_k2", "prompt_end": "<think>"}
    assert whole("kimi_k2", f"I call it.{kimi([CITY])}", **fields) == ("I call it.", "", [CITY])


def test_reasoning_and_calls_each_get_their_end():
    """vLLM 51679: the end of the reasoning was taken by the reader of calls."""
    text = f"Hm.</think>\n\n{WRITE['qwen3_coder']([CITY])}"
    fields = {"reasoning_parser": "deepseek_r1"}
    assert whole("qwen3_coder", text, **fields) == ("Hm.", "", [CITY])


def test_end_of_reasoning_in_the_examples_of_a_prompt():
    """vLLM 45763: only the end of the prompt counts."""
    prompt = "Write <think>a</think>b, as above.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    settings = ParseSettings(reasoning_parser="qwen3", prompt_end=prompt)
    found = Message.of(pieces_of(settings, ["Hm.</think>Yes."]))
    assert (found.reasoning, found.content) == ("Hm.", "Yes.")


def test_several_tokens_in_a_piece():
    """vLLM 45256, 32152, 39253, 41967: steps of several tokens, as with drafts."""
    for name, write in WRITE.items():
        calls = [CITY] if name == "gpt_oss" else [CITY, NOW, CITY]
        text = write(calls)
        settings = ParseSettings(tool_parser=name, tools=TOOLS)
        for size in (2, 5, 17, 64):
            parts = [text[at : at + size] for at in range(0, len(text), size)]
            assert calls_of(Message.of(pieces_of(settings, parts))) == calls


CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
HARMONY = [
    # The recipient in the role's part, without a content type, or followed by a stray marker.
    CALL,
    '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Oslo"}',  # noqa: E501
    CALL.replace("functions.", ""),
    CALL.replace(" <|constrain|>", "<|channel|>commentary "),
    CALL.replace("commentary", "analysis"),
    f"{CALL}<|call|>",
]  # fmt: skip


@pytest.mark.parametrize("text", HARMONY)
def test_harmony_headers(text):
    """vLLM 32587 and others."""
    assert whole("gpt_oss", text) == ("", "", [CITY])


def test_harmony_channels():
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look. <|end|><|start|>assistant"
    text = f"{thought}{preamble}{thought}{CALL}"
    assert whole("gpt_oss", text) == ("Hm.Hm.", "I look. ", [CITY])
    final = f"{thought}<|channel|>final<|message|>1 < 2 <b>\n<|return|>"
    assert whole("gpt_oss", final) == ("Hm.", "1 < 2 <b>\n", [])
    none = CALL.replace('{"city": "Oslo"}', "<|call|>").replace("get_weather", "now")
    assert whole("gpt_oss", none) == ("", "", [NOW])


def test_broken_header_of_harmony_is_content():
    """vLLM 51977, 57099, 23567: no error reaches the client."""
    text = "<|channel|>final Yes.<|return|>"
    reasoning, content, calls = whole("gpt_oss", text)
    assert not reasoning and not calls and "Yes." in content
    assert whole("gpt_oss", "Just text.") == ("", "Just text.", [])
    broken = CALL.replace('"Oslo"}', "?}")
    assert whole("gpt_oss", broken)[2] == []


def test_arguments_of_gpt_oss_that_are_cut_off():
    settings = ParseSettings(tool_parser="gpt_oss", tools=TOOLS)
    found = Message.of(pieces_of(settings, [CALL[:-4]], is_cut=True))
    assert found.calls == [["get_weather", '{"city": "Os']] and not found.content


def test_halves_of_characters_are_valid_json_for_clients():
    for name, text in (
        ("pythonic", r"[get_weather(city='\ud83d\ude00 \ud83d')]"),
        ("qwen3_coder", WRITE["qwen3_coder"]([("get_weather", {"near": ["\ud83d"]})])),
    ):
        settings = ParseSettings(tool_parser=name, tools=TOOLS)
        ((_, arguments),) = Message.of(pieces_of(settings, [text])).calls
        arguments.encode()
        json.loads(arguments)
