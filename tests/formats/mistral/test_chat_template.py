"""Chat templates by the tokenizer's version. Expected texts are those of mistral-common 1.13."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from formats.mistral.chat_template import chat_template

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOOLS = '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "f", "parameters": {}}}]'
TOOLS += "[/AVAILABLE_TOOLS]"
CALL = {"id": "abcdefgh1", "function": {"name": "f", "arguments": '{"a": "é"}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "name": "f", "content": "sunny"},
]
EFFORT = {"reasoning_effort": {"type": "enum", "values": ["none", "high"], "default": "none"}}
SYSTEM = "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"
EXPECTED = {
    "v2": f"<s>[INST]one[/INST]two</s>{TOOLS}[INST]Be brief.\n\nthree[/INST]"
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "é"}}]</s>'
    '[TOOL_RESULTS][{"name": "f", "content": "sunny"}][/TOOL_RESULTS]',
    "v3": f"<s>[INST]one[/INST]two</s>{TOOLS}[INST]Be brief.\n\nthree[/INST]"
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "é"}, "id": "abcdefgh1"}]</s>'
    '[TOOL_RESULTS]{"content": "sunny", "call_id": "abcdefgh1"}[/TOOL_RESULTS]',
    "v7": f"{SYSTEM}[INST]one[/INST]two</s>{TOOLS}[INST]three[/INST]"
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "é"}, "id": "abcdefgh1"}]</s>'
    "[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]sunny[/TOOL_RESULTS]",
    "v11": f"{SYSTEM}[INST]one[/INST]two</s>{TOOLS}[INST]three[/INST]"
    '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"a": "é"}</s>'
    "[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]sunny[/TOOL_RESULTS]",
    "v13": f"{SYSTEM}{TOOLS}[INST]one[/INST]two</s>[INST]three[/INST]"
    '[TOOL_CALLS]f[ARGS]{"a": "é"}</s>[TOOL_RESULTS]sunny[/TOOL_RESULTS]',
    "v15": f'{SYSTEM}{TOOLS}[MODEL_SETTINGS]{{"reasoning_effort": "none"}}[/MODEL_SETTINGS]'
    "[INST]one[/INST]two</s>[INST]three[/INST]"
    '[TOOL_CALLS]f[ARGS]{"a": "é"}</s>[TOOL_RESULTS]sunny[/TOOL_RESULTS]',
}


def rendered(template, messages, tools=None, **options):
    (text,), _ = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=template,
        bos_token="<s>",
        eos_token="</s>",
        **options,
    )
    return text


@pytest.mark.parametrize("version", EXPECTED)
def test_conversations_of_each_version(version):
    template = chat_template(version, settings=EFFORT, thinks=True)
    assert rendered(template, CHAT, [TOOL]) == EXPECTED[version]


def test_the_first_version():
    expected = "<s>[INST] Be brief.\n\none [/INST] two</s>[INST] three [/INST]"
    assert rendered(chat_template("v1"), CHAT[:4]) == expected


def test_effort_is_checked_and_written():
    template = chat_template("v15", settings=EFFORT)
    text = rendered(template, CHAT[1:2], reasoning_effort="high")
    assert (
        text == '<s>[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS][INST]one[/INST]'
    )
    with pytest.raises(Exception, match="must be one of none, high"):
        rendered(template, CHAT[1:2], reasoning_effort="low")
    assert "MODEL_SETTINGS" not in chat_template("v15")


def test_images_and_thoughts():
    template = chat_template("v13", thinks=True)
    image, text = {"type": "image"}, {"type": "text", "text": "what?"}
    asked = [{"role": "user", "content": [image, text]}]
    assert rendered(template, asked) == "<s>[INST][IMG]what?[/INST]"
    # mistral-common moves an image after the only text before it
    moved = [{"role": "user", "content": [text, image]}]
    assert rendered(template, moved) == "<s>[INST][IMG]what?[/INST]"
    several = [{"role": "user", "content": [image, text, image]}]
    assert rendered(template, several) == "<s>[INST][IMG]what?[IMG][/INST]"
    thought = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    assert rendered(template, [*asked, thought]).endswith("[/INST][THINK]hm[/THINK]so</s>")


def test_json_results_stay_json():
    messages = [CHAT[1], CHAT[4], {**CHAT[5], "content": '{"t": 21}'}]
    text = rendered(chat_template("v3"), messages)
    assert '{"content": {"t": 21}, "call_id"' in text
