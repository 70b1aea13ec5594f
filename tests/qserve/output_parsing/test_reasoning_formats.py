"""Each row of REASONING_PARSERS: documented texts, however they are cut."""

import pytest

from qserve.output_parsing.output_parser import Message, OutputParser, ParseSettings
from qserve.output_parsing.pieces import merged
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS

THINK = "<think>\nHm.\n\nSo </th>.\n</think>\n\nYes."
HM = "Hm.\n\nSo </th>."
GRANITE = "Here is my thought process: Hm.\n\nHere is my response: Yes."
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
)
NORTH = "<|START_THINKING|>Hm.<|END_THINKING|>"
# parser, the prompt's end, text, reasoning, content
CASES = [
    *((name, "", THINK, HM, "Yes.") for name in ("deepseek_r1", "deepseek_v31", "qwen3", "glm45")),
    *((name, "", THINK, HM, "Yes.") for name in ("kimi_k2", "minimax_m2", "olmo3", "step3")),
    *((name, "<think>\n", "Hm.</think>Yes.", "Hm.", "Yes.") for name in ("qwen3", "olmo3")),
    ("minimax_m2", "<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("minimax_m3", "]~b]ai\n", "<mm:think>Hm.</think></mm:think>Yes.", "Hm.</think>", "Yes."),
    ("minimax_m3", "]~b]ai\n<mm:think>\n", "Hm.</mm:think>Yes.", "Hm.", "Yes."),
    ("minimax_m3", "]~b]ai\n</mm:think>", "Yes.", "", "Yes."),
    ("deepseek_v31", "<｜Assistant｜></think>", "Yes <think>.", "", "Yes <think>."),
    ("glm45", "<|assistant|>\n<think></think>", "Yes.", "", "Yes."),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("seed_oss", "<seed:think>\n", "Hm.</think>.</seed:think>Yes.", "Hm.</think>.", "Yes."),
    ("mistral", "", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("mistral", "", "<think>\nHm. [/THINK]\n</think>\nYes.", "Hm. [/THINK]", "Yes."),
    ("mistral", "", "Yes [THINK].", "", "Yes [THINK]."),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", "<|turn>model\n", "<|channel>thought\n<channel|>Yes.", "", "Yes."),
    ("gemma4", "<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
    ("granite", "", GRANITE, "Hm.", "Yes."),
    ("granite", "", GRANITE.replace("Here is", "Here's"), "Hm.", "Yes."),
    ("granite", "", "<think>Hm.</think>\n<response>Yes.</response>", "Hm.", "Yes."),
    ("granite", "", "Here is my answer.", "", "Here is my answer."),
    ("hunyuan", "", "<think>\nHm.\n</think>\n<answer>\nYes < no\n</answer>", "Hm.", "Yes < no"),
    ("hunyuan", "<think>\n\n</think>", "Yes <answer>", "", "Yes <answer>"),
    ("ernie45", "<think>\n", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes.\n"),
    *(
        (parser, "<|CHATBOT_TOKEN|>", f"{NORTH}<|START_{a}|>Yes.<|END_{a}|>", "Hm.", "Yes.")
        for parser, a in (("cohere_command3", "RESPONSE"), ("cohere_command4", "TEXT"))
    ),
    ("cohere_command4", NORTH, "<|START_TEXT|>Yes.<|END_TEXT|>", "", "Yes."),
    ("cohere_command4", "<|START_THINKING|>", "Hm.<|END_THINKING|>Yes.", "Hm.", "Yes."),
    ("gpt_oss", "<|start|>assistant", HARMONY, "Hm.", "Yes."),
]


def pieces_of(settings, texts):
    parser = OutputParser(settings)
    found = [piece for text in texts for piece in parser.push(text)]
    return merged(found + parser.finish())


@pytest.mark.parametrize(("name", "prompt_end", "text", "reasoning", "content"), CASES)
def test_reasoning(name, prompt_end, text, reasoning, content):
    settings = ParseSettings(reasoning_parser=name, prompt_end=prompt_end)
    whole = pieces_of(settings, [text])
    for at in range(1, len(text)):
        assert pieces_of(settings, [text[:at], text[at:]]) == whole, text[:at]
    assert pieces_of(settings, text) == whole
    found = Message.of(whole)
    assert (found.reasoning, found.content) == (reasoning, content)


def test_every_row_has_cases():
    assert {name for name, *_ in CASES} == {*REASONING_PARSERS}


@pytest.mark.parametrize("name", list(REASONING_PARSERS))
def test_tokens_of_reasoning_are_counted(name):
    """Each character is a token here: those of the markers and of the reasoning count."""
    prompt_end, text, reasoning = next(case[1:4] for case in CASES if case[0] == name)
    counter = ParseSettings(reasoning_parser=name, prompt_end=prompt_end).reasoning_tokens()
    for char in text:
        counter.add(char, 1)
    assert len(reasoning) <= counter.count < len(text)
