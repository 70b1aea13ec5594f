"""Calls as each model family writes them, made by the families' documented templates.

Independent of the rows of `TOOL_PARSERS`: these functions are what the parsers are judged by.
"""

import json

CITY = {"city": "Paris, \"Île-de-France\" 東京 🗼 \\ 'x'", "days": 3, "code": "007"}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "code": {"type": "string"},
            "exact": {"$ref": "#/$defs/exact"},
            "near": {"type": "array", "items": {"type": "object"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "body": {"type": "object"},
        },
        "$defs": {"exact": {"type": "boolean"}},
    },
    "now": {"type": "object", "properties": {}},
    "functions-2.run": {"type": "object", "properties": {"command": {"type": "string"}}},
}
# Arguments of calls that are hard to read: quotes, brackets, line breaks, tags, numbers as texts.
NESTED = {"city": "", "exact": False, "near": [{"a": [1, -2.5, None, "}]"]}], "note": None}
LINES = {"city": "line 1\nline 2\n\tindented", "note": "42", "body": {"k": {"l": "v"}}}
HARD = [
    ("get_weather", CITY),
    ("get_weather", NESTED),
    ("get_weather", LINES),
    ("get_weather", {"city": "a < b && c > d </b> {x} [y] `z` \u2028", "days": -1}),
    ("now", {}),
]


def bare(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def objects(calls, key="arguments"):
    return [json.dumps({"name": name, key: args}, ensure_ascii=False) for name, args in calls]


def listed(calls):
    return f"[{', '.join(objects(calls))}]"


def wrapped(calls, start, end, between="\n"):
    return between.join(f"{start}{each}{end}" for each in objects(calls))


def cohere(calls):
    written = [
        json.dumps(
            {"tool_call_id": str(number), "tool_name": name, "parameters": args},
            ensure_ascii=False,
        )
        for number, (name, args) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(written) + "\n]<|END_ACTION|>"


def python_calls(calls):
    return [f"{n}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for n, args in calls]


def coder(calls, outer="tool_call"):
    return "\n".join(
        f"<{outer}>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in args.items())
        + f"</function>\n</{outer}>"
        for name, args in calls
    )


def glm(calls, line):
    return line.join(
        f"<tool_call>{name}{line}"
        + "".join(
            f"<arg_key>{k}</arg_key>{line}<arg_value>{bare(v)}</arg_value>{line}"
            for k, v in args.items()
        )
        + "</tool_call>"
        for name, args in calls
    )


def invoked(calls, mark="", line="\n", typed=False, own_lines=False):
    def value(found):
        return f"{line}{bare(found)}{line}" if own_lines else bare(found)

    def attribute(value):
        return f' string="{str(isinstance(value, str)).lower()}"' * typed

    return line.join(
        f'<{mark}invoke name="{name}">{line}'
        + "".join(
            f'<{mark}parameter name="{k}"{attribute(v)}>{value(v)}</{mark}parameter>{line}'
            for k, v in args.items()
        )
        + f"</{mark}invoke>"
        for name, args in calls
    )


def elements(calls):
    """MiniMax-M3's: tags with the names of arguments, each after a token."""
    mark = "]<]minimax[>["

    def value(found):
        if isinstance(found, dict):
            return "".join(f"{mark}<{k}>{value(v)}{mark}</{k}>" for k, v in found.items())
        if isinstance(found, list):
            return "".join(f"{mark}<item>{value(each)}{mark}</item>" for each in found)
        return bare(found)

    each = (f'{mark}<invoke name="{name}">{value(args)}{mark}</invoke>\n' for name, args in calls)
    return f"{mark}<tool_call>\n{''.join(each)}{mark}</tool_call>"


def steps(calls):
    start, end = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"
    each = (f"{start}{invoked([call], 'steptml:', '')}{end}" for call in calls)
    return f"<｜tool_calls_begin｜>{''.join(each)}<｜tool_calls_end｜>"


def deepseek(calls, before, separator, end, between):
    each = (
        f"<｜tool▁call▁begin｜>{before}{name}{separator}{bare(args)}{end}<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{between.join(each)}<｜tool▁calls▁end｜>"


def kimi(calls):
    each = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{bare(args)}"
        "<|tool_call_end|>"
        for index, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def gemma(calls, quote, start, end):
    def value(found):
        if isinstance(found, str):
            return f"{quote}{found}{quote}"
        if isinstance(found, dict):
            return f"{{{','.join(f'{k}:{value(v)}' for k, v in found.items())}}}"
        return f"[{','.join(map(value, found))}]" if isinstance(found, list) else bare(found)

    return "".join(f"{start}call:{name}{value(args)}{end}" for name, args in calls)


def harmony(calls):
    """One call: the model stops after it, and the stop token is no part of the text."""
    ((name, args),) = calls
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{header}<|message|>{bare(args)}"


WRITE = {
    "hermes": lambda calls: wrapped(calls, "<tool_call>\n", "\n</tool_call>"),
    "llama3_json": lambda calls: "; ".join(objects(calls, "parameters")),
    "mistral": lambda calls: f"[TOOL_CALLS]{listed(calls)}",
    "pythonic": lambda calls: f"[{', '.join(python_calls(calls))}]",
    "qwen3_coder": coder,
    "qwen3_xml": coder,
    "deepseek_v3": lambda calls: deepseek(
        calls, "function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"
    ),
    "deepseek_v31": lambda calls: deepseek(calls, "", "<｜tool▁sep｜>", "", ""),
    "deepseek_v32": lambda calls: (
        f"<｜DSML｜function_calls>\n{invoked(calls, '｜DSML｜', typed=True)}\n"
        "</｜DSML｜function_calls>"
    ),
    "kimi_k2": kimi,
    "glm45": lambda calls: glm(calls, "\n"),
    "glm47": lambda calls: glm(calls, ""),
    "minimax_m2": lambda calls: f"<minimax:tool_call>\n{invoked(calls)}\n</minimax:tool_call>",
    "dots": lambda calls: (
        f"<dots_function_call>\n{invoked(calls, own_lines=True)}\n</dots_function_call>"
    ),
    "minimax_m3": elements,
    "gpt_oss": harmony,
    "gemma4": lambda calls: gemma(calls, '<|"|>', "<|tool_call>", "<tool_call|>"),
    "functiongemma": lambda calls: gemma(
        calls, "<escape>", "<start_function_call>", "<end_function_call>"
    ),
    "granite": lambda calls: f"<|tool_call|>{listed(calls)}",
    "phi4_mini": lambda calls: f"functools{listed(calls)}",
    "seed_oss": lambda calls: coder(calls, "seed:tool_call"),
    "olmo3": lambda calls: (
        "<function_calls>\n" + "\n".join(python_calls(calls)) + "\n</function_calls>"
    ),
    "hunyuan": lambda calls: f"<tool_calls>{listed(calls)}</tool_calls>",
    "ernie45": lambda calls: wrapped(calls, "<tool_call>\n", "\n</tool_call>\n", ""),
    "step3": steps,
    "cohere_command3": cohere,
    "cohere_command4": cohere,
    "xlam": listed,
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(python_calls(calls))}]<|tool_call_end|>",
}
# Formats whose calls must begin the text, or end it.
AT_START = {"llama3_json", "pythonic", "xlam"}
ONE_CALL = {"gpt_oss"}
