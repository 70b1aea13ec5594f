"""Chooses the parsers of tool calls and reasoning from a model's chat template and config.

A rule matches a template that contains all of the rule's texts, and a model type if the rule names
any. The first matching rule counts. So if format A includes all texts of format B, the rule for A
comes first.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    parser: str
    has: tuple[str, ...] = ()  # texts that the template must contain
    lacks: tuple[str, ...] = ()  # texts that the template must not contain
    model_types: tuple[str, ...] = ()  # config.json must have one of these; empty: any


TOOL_RULES = (
    Rule(parser="gpt_oss", model_types=("gpt_oss",)),
    Rule(parser="gpt_oss", has=("<|channel|>", "<|start|>", "to=functions.")),
    # DeepSeek V4 has another format of calls, which is not supported.
    Rule(parser=NONE, has=("DSML", "tool_calls>"), lacks=("function_calls",)),
    Rule(parser="deepseek_v32", has=("DSML",)),
    Rule(parser="deepseek_v3", has=("<｜tool▁calls▁begin｜>", "```json")),
    Rule(parser="deepseek_v31", has=("<｜tool▁calls▁begin｜>",)),
    Rule(parser="kimi_k2", has=("<|tool_calls_section_begin|>",)),
    Rule(parser="cohere_command4", has=("<|START_ACTION|>", "<|START_TEXT|>")),
    Rule(parser="cohere_command3", has=("<|START_ACTION|>",)),
    Rule(parser="minimax_m2", has=("<minimax:tool_call>",)),
    Rule(parser="dots", has=("<dots_function_call>",)),
    Rule(parser="minimax_m3", has=("]<]minimax[>[", "<tool_call>")),
    Rule(parser="seed_oss", has=("<seed:tool_call>",)),
    Rule(parser="step3", has=("<steptml:invoke",)),
    Rule(parser=NONE, has=("<arg_key>", "<tool_sep>")),  # Hunyuan 3
    Rule(parser="glm47", has=("<arg_key>", "<tool_call>{function-name}<arg_key>")),
    Rule(parser="glm45", has=("<arg_key>",)),
    Rule(parser="qwen3_coder", has=("<function=", "<parameter=")),
    Rule(parser="gemma4", has=("<|tool_call>",)),
    Rule(parser="functiongemma", has=("<start_function_call>",)),
    Rule(parser="lfm2", has=("<|tool_call_start|>",)),
    Rule(parser="lfm2", has=("<|tool_list_start|>",)),
    Rule(parser="olmo3", has=("<function_calls>",)),
    Rule(parser="hunyuan", has=("<tool_calls>",), lacks=("<tool_sep>",)),
    Rule(parser="granite", has=("<|tool_call|>",)),
    Rule(parser="phi4_mini", has=("<|tool|>",)),
    Rule(parser="phi4_mini", has=("functools[",)),
    Rule(parser="mistral", has=("[TOOL_CALLS]",)),
    Rule(parser="pythonic", has=("<|python_start|>",)),
    Rule(parser="pythonic", model_types=("llama4",)),
    Rule(parser="llama3_json", has=("<|python_tag|>",)),
    Rule(parser="llama3_json", has=('"parameters": dictionary of argument name',)),
    Rule(parser="ernie45", has=("<tool_call>", "<response>")),
    Rule(parser="ernie45", has=("<tool_call>",), model_types=("ernie4_5", "ernie4_5_moe")),
    Rule(parser="hermes", has=("<tool_call>", "</tool_call>")),
)
REASONING_RULES = (
    Rule(parser="gpt_oss", model_types=("gpt_oss",)),
    Rule(parser="gpt_oss", has=("<|channel|>", "<|start|>", "analysis")),
    Rule(parser="cohere_command4", has=("<|START_THINKING|>", "<|START_TEXT|>")),
    Rule(parser="cohere_command3", has=("<|START_THINKING|>",)),
    Rule(parser="cohere_command3", has=("<|START_RESPONSE|>",)),
    Rule(parser="mistral", has=("[THINK]",)),
    Rule(parser="seed_oss", has=("<seed:think>",)),
    Rule(parser="minimax_m3", has=("<mm:think>",)),
    Rule(parser="gemma4", has=("<|channel>",)),
    Rule(parser="granite", has=("Here is my thought process",)),
    Rule(parser="granite", has=("</think>", "<response>"), model_types=("granite", "granitemoe")),
    Rule(parser="ernie45", has=("</think>", "<response>")),
    Rule(parser="hunyuan", has=("</think>", "<answer>")),
    Rule(parser="minimax_m2", has=("</think>", "<minimax:tool_call>")),
    Rule(parser="kimi_k2", has=("</think>", "<|tool_calls_section_begin|>")),
    Rule(parser="glm45", has=("</think>", "<arg_key>")),
    Rule(parser="step3", has=("</think>", "<steptml:invoke")),
    Rule(parser="olmo3", has=("<think>", "<function_calls>")),
    Rule(parser="olmo3", has=("<think>",), model_types=("olmo3", "olmo2")),
    # DeepSeek R1 always thinks; V3.1 and later think only if the prompt says so.
    Rule(parser="deepseek_v31", has=("</think>", "<｜Assistant｜>", "thinking")),
    Rule(parser="deepseek_r1", has=("</think>", "<｜Assistant｜>")),
    Rule(parser="qwen3", has=("</think>",)),
    Rule(parser="qwen3", has=("<think>",)),
)


def detect(rules: Sequence[Rule], template: str, model_type: str) -> str:
    """Return the name of the parser for a chat template and a model type, or NONE."""
    for rule in rules:
        if rule.model_types and model_type not in rule.model_types:
            continue
        if any(text in template for text in rule.lacks):
            continue
        if all(text in template for text in rule.has):
            return rule.parser
    return NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """The parsers that a server uses; None: no parser."""

    tool_calls: str | None
    reasoning: str | None
    # Sentences for the log, one per parser.
    reports: tuple[str, ...] = ()

    @classmethod
    def chosen(
        cls, tool_calls: str | None, reasoning: str | None, *, template: str, model_type: str
    ) -> "Parsers":
        """Resolve AUTO and NONE. `template`: text of all chat templates of the model."""
        found, reports = [], []
        for flag, asked, rules in (
            ("tool-call-parser", tool_calls, TOOL_RULES),
            ("reasoning-parser", reasoning, REASONING_RULES),
        ):
            parser = detect(rules, template, model_type) if asked == AUTO else asked
            parser = None if parser == NONE else parser
            source = "as set"
            if asked == AUTO:
                source = "from the model's chat template and config"
            if asked == AUTO and parser is None:
                source = f"the chat template has no known format; set --{flag} to choose one"
            found.append(parser)
            reports.append(f"--{flag}: {parser or NONE} ({source})")
        return cls(tool_calls=found[0], reasoning=found[1], reports=tuple(reports))


def model_type(folder: str) -> str:
    """Return the `model_type` in a model folder's config.json; "" if there is none."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    found = config.get("model_type") if isinstance(config, dict) else None
    return found if isinstance(found, str) else ""
