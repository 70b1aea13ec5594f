"""The parsers that are chosen from what chat templates contain."""

import pytest

from qserve.output_parsing.detection import NONE, REASONING_RULES, TOOL_RULES, Parsers, detect
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from tests.qserve.output_parsing.written_calls import WRITE

SEEK, V3 = "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"
# Texts in a family's template, the model type, and the parsers.
CASES = [
    ("", "", "none", "none"),
    ("{{ message.content }}", "", "none", "none"),
    ("<tool_call> {name, arguments} </tool_call>", "qwen2", "hermes", "none"),
    ("<tool_call> </tool_call> <think> </think>", "qwen3", "hermes", "qwen3"),
    ("<tool_call> <function= <parameter= </think>", "qwen3_next", "qwen3_coder", "qwen3"),
    ("<tool_call>{function-name}\n<arg_key> </think>", "glm4_moe", "glm45", "glm45"),
    ("<tool_call>{function-name}<arg_key> </think>", "glm4_moe", "glm47", "glm45"),
    (f"{SEEK} {V3} ```json </think>", "deepseek_v3", "deepseek_v3", "deepseek_r1"),
    (f"{SEEK} {V3} thinking </think>", "deepseek_v3", "deepseek_v31", "deepseek_v31"),
    (f"{SEEK} ｜DSML｜ function_calls thinking </think>", "", "deepseek_v32", "deepseek_v31"),
    ("<|tool_calls_section_begin|>", "kimi_k2", "kimi_k2", "none"),
    ("<|tool_calls_section_begin|> </think>", "kimi_k2", "kimi_k2", "kimi_k2"),
    ("<minimax:tool_call> <think> </think>", "minimax_m2", "minimax_m2", "minimax_m2"),
    (
        "<|START_THINKING|> <|START_ACTION|> <|START_TEXT|>",
        "cohere2_moe",
        "cohere_command4",
        "cohere_command4",
    ),
    (
        "<|START_THINKING|> <|START_ACTION|> <|START_RESPONSE|>",
        "cohere2",
        "cohere_command3",
        "cohere_command3",
    ),
    ("<dots_function_call> <think> </think>", "dots3_note", "dots", "qwen3"),
    ("]<]minimax[>[ <tool_call> <mm:think>", "minimax_m3_vl", "minimax_m3", "minimax_m3"),
    ("<seed:tool_call> <function= <parameter= <seed:think>", "seed_oss", "seed_oss", "seed_oss"),
    ("<|tool_call>call: <|channel>thought", "gemma4", "gemma4", "gemma4"),
    ("<start_function_call>", "gemma3_text", "functiongemma", "none"),
    ("<|channel|>analysis to=functions. <|start|>", "gpt_oss", "gpt_oss", "gpt_oss"),
    ("<|tool_call|> Here is my thought process:", "granite", "granite", "granite"),
    ("<|tool|> <|/tool|>", "phi3", "phi4_mini", "none"),
    ("<function_calls> <think>", "olmo3", "olmo3", "olmo3"),
    ("<tool_calls> <think> </think> <answer>", "hunyuan_v1_moe", "hunyuan", "hunyuan"),
    ("<tool_call> </think> <response>", "ernie4_5_moe", "ernie45", "ernie45"),
    ("<steptml:invoke <think> </think>", "step3", "step3", "step3"),
    ("<|tool_call_start|>", "lfm2", "lfm2", "none"),
    ("[TOOL_CALLS] [THINK]", "mistral3", "mistral", "mistral"),
    ("<|python_tag|>", "llama", "llama3_json", "none"),
    ("<|python_start|>", "llama4", "pythonic", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "model_type", "tool_calls", "reasoning"), CASES)
def test_parsers_are_detected_from_templates(template, model_type, tool_calls, reasoning):
    found = Parsers.chosen("auto", "auto", template=template, model_type=model_type)
    assert (found.tool_calls or NONE, found.reasoning or NONE) == (tool_calls, reasoning)


def test_explicit_parser_overrides_detection():
    found = Parsers.chosen("hermes", "none", template="[TOOL_CALLS] [THINK]", model_type="")
    assert (found.tool_calls, found.reasoning) == ("hermes", None)
    assert found.reports == (
        "--tool-call-parser: hermes (as set)",
        "--reasoning-parser: none (as set)",
    )


def test_detection_rules_name_existing_parsers():
    assert {rule.parser for rule in TOOL_RULES} <= {NONE, *TOOL_PARSERS}
    assert {rule.parser for rule in REASONING_RULES} <= {NONE, *REASONING_PARSERS}


@pytest.mark.parametrize(
    "name", sorted({*WRITE} - {"xlam", "qwen3_xml", "llama3_json", "pythonic"})
)
def test_template_calls_identify_their_format(name):
    """Templates write the history's calls in the format, with the mark of each."""
    text = WRITE[name]([("f", {"a": "b"})])
    expected = {"ernie45": "hermes", "glm47": "glm45", "cohere_command4": "cohere_command3"}.get(
        name, name
    )
    if name == "gpt_oss":
        text = f"<|start|>assistant{text}"
    assert detect(TOOL_RULES, text, "") == expected
