"""TOOL_PARSERS: value of --tool-call-parser -> format of the tool calls."""

from dataclasses import replace

from qserve.output_parsing.grammars import call_notations as notations
from qserve.output_parsing.notations import harmony, json_calls, pythonic
from qserve.output_parsing.notations.braced_calls import Braced
from qserve.output_parsing.notations.namespaced_calls import SPACE_NAME, namespaced
from qserve.output_parsing.notations.tagged_calls import Tags
from qserve.output_parsing.tool_format import Body, Name, ToolFormat

# JSON: arguments after the tool's name; objects with name and arguments, alone or in a list.
ARGUMENTS = Body(read=json_calls.arguments, lark=notations.arguments)
OBJECT = Body(read=json_calls.objects, lark=notations.named_object)
LIST = Body(read=json_calls.objects, lark=notations.named_object, left="[", right="]")
COHERE_LIST = Body(read=json_calls.cohere, lark=notations.cohere, left="[\n    ", right="\n]")
# Python calls with keyword arguments, in a list or one per line.
PYTHON_LIST = Body(read=pythonic.pythonic, lark=notations.python, left="[", right="]")
PYTHON_LINES = Body(read=pythonic.pythonic, lark=notations.python)


def tagged(tags: Tags) -> Body:
    """Return the body for arguments as bare text in tags."""
    texts = (*tags.kinds, tags.key_end, tags.value)
    return Body(read=tags.read, lark=notations.tagged(tags), texts=texts)


def braced(quote: str) -> Body:
    """Return the body for Gemma's braces with bare keys."""
    return Body(read=Braced(quote=quote).read, lark=notations.braced(quote), texts=(quote,))


CODER = Tags(
    call="<tool_call>",
    function="<function=",
    parameter="<parameter=",
    value_end="</parameter>",
    function_end="</function>",
    call_end="</tool_call>",
    trims=True,
    is_spaced=True,
)
SEED = Tags(
    call="<seed:tool_call>",
    function="<function=",
    parameter="<parameter=",
    value_end="</parameter>",
    function_end="</function>",
    call_end="</seed:tool_call>",
    trims=True,
    is_spaced=True,
)
DSML = Tags(
    call="<｜DSML｜function_calls>",
    function="<｜DSML｜invoke name=",
    parameter="<｜DSML｜parameter name=",
    value_end="</｜DSML｜parameter>",
    function_end="</｜DSML｜invoke>",
    call_end="</｜DSML｜function_calls>",
    quote='"',
    has_types=True,
    is_spaced=True,
)
MINIMAX = Tags(
    call="<minimax:tool_call>",
    function="<invoke name=",
    parameter="<parameter name=",
    value_end="</parameter>",
    function_end="</invoke>",
    call_end="</minimax:tool_call>",
    quote='"',
    is_spaced=True,
)
DOTS = replace(MINIMAX, call="<dots_function_call>", call_end="</dots_function_call>", trims=True)
# Only the grammar uses these; an end tag has the argument's name after `value_end`.
MINIMAX_M3 = Tags(
    call=f"{SPACE_NAME}<tool_call>",
    function=f"{SPACE_NAME}<invoke name=",
    parameter=f"{SPACE_NAME}<",
    value_end=SPACE_NAME,
    function_end=f"{SPACE_NAME}</invoke>",
    call_end=f"{SPACE_NAME}</tool_call>",
    quote='"',
)
STEP = Tags(
    call="<｜tool_call_begin｜>function<｜tool_sep｜>",
    function="<steptml:invoke name=",
    parameter="<steptml:parameter name=",
    value_end="</steptml:parameter>",
    function_end="</steptml:invoke>",
    call_end="<｜tool_call_end｜>",
    quote='"',
)
GLM = Tags(
    call="<tool_call>",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    call_end="</tool_call>",
)
COHERE = ToolFormat(
    opens=("<|START_ACTION|>",),
    body=COHERE_LIST,
    closes=("<|END_ACTION|>",),
    num_shared=1,
    between=",\n    ",
)
CODER_FORMAT = ToolFormat(
    opens=("<tool_call>\n", "<function="),
    inner=("<function=",),
    body=tagged(CODER),
    closes=("</function>\n", "</tool_call>"),
    between="\n",
)

TOOL_PARSERS = {
    "hermes": ToolFormat(
        opens=("<tool_call>\n",),
        body=OBJECT,
        closes=("\n</tool_call>",),
        between="\n",
        again=json_calls.HERMES_AGAIN,
    ),
    "llama3_json": ToolFormat(
        opens=("<|python_tag|>",),
        starts=("{",),
        is_bare=True,
        body=Body(read=json_calls.bare_objects, lark=notations.bare_object),
        between="; ",
        again=json_calls.LLAMA_AGAIN,
    ),
    "mistral": ToolFormat(
        opens=("[TOOL_CALLS]",),
        body=Body(read=json_calls.mistral, whole=notations.mistral, texts=("[ARGS]", "[CALL_ID]")),
        again=json_calls.MISTRAL_AGAIN,
    ),
    "pythonic": ToolFormat(
        opens=("<|python_start|>",),
        starts=("[",),
        is_bare=True,
        body=PYTHON_LIST,
        closes=("<|python_end|>",),
        num_shared=1,
        between=", ",
        again=pythonic.AGAIN,
    ),
    "qwen3_coder": CODER_FORMAT,
    "qwen3_xml": CODER_FORMAT,  # vLLM's other name of qwen3_coder
    "deepseek_v3": ToolFormat(
        opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
        name=Name(),
        separator="\n```json\n",
        body=ARGUMENTS,
        closes=("\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        num_shared=1,
        between="\n",
    ),
    "deepseek_v31": ToolFormat(
        opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        name=Name(),
        separator="<｜tool▁sep｜>",
        body=ARGUMENTS,
        closes=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        num_shared=1,
    ),
    "deepseek_v32": ToolFormat(
        opens=("<｜DSML｜function_calls>\n", "<｜DSML｜invoke name="),
        body=tagged(DSML),
        closes=("</｜DSML｜invoke>\n", "</｜DSML｜function_calls>"),
        num_shared=1,
    ),
    "kimi_k2": ToolFormat(
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        name=Name(before="functions.", is_numbered=True),
        separator="<|tool_call_argument_begin|>",
        body=ARGUMENTS,
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        num_shared=1,
    ),
    "glm45": ToolFormat(
        opens=("<tool_call>",),
        body=tagged(replace(GLM, is_spaced=True)),
        closes=("</tool_call>",),
        between="\n",
    ),
    "glm47": ToolFormat(
        opens=("<tool_call>",),
        body=tagged(GLM),
        closes=("</tool_call>",),
    ),
    "minimax_m2": ToolFormat(
        opens=("<minimax:tool_call>\n", "<invoke name="),
        body=tagged(MINIMAX),
        closes=("</invoke>\n", "</minimax:tool_call>"),
        num_shared=1,
    ),
    "dots": ToolFormat(
        opens=("<dots_function_call>\n", "<invoke name="),
        body=tagged(DOTS),
        closes=("</invoke>\n", "</dots_function_call>"),
        num_shared=1,
    ),
    "minimax_m3": ToolFormat(
        opens=(f"{SPACE_NAME}<tool_call>\n", f"{SPACE_NAME}<invoke name="),
        body=Body(read=namespaced, lark=notations.named_tags(MINIMAX_M3), texts=(SPACE_NAME,)),
        closes=(f"{SPACE_NAME}</invoke>\n", f"{SPACE_NAME}</tool_call>"),
        num_shared=1,
    ),
    "gpt_oss": ToolFormat(
        also=harmony.OPENS,
        body=Body(
            read=harmony.harmony,
            whole=harmony.lark,
            left=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
            texts=harmony.MARKERS,
            is_text_message=True,
        ),
        only_one=True,
    ),
    "gemma4": ToolFormat(
        opens=("<|tool_call>", "call:"),
        name=Name(),
        body=braced('<|"|>'),
        closes=("<tool_call|>",),
    ),
    "functiongemma": ToolFormat(
        opens=("<start_function_call>", "call:"),
        name=Name(),
        body=braced("<escape>"),
        closes=("<end_function_call>",),
    ),
    "granite": ToolFormat(
        opens=("<|tool_call|>",),
        also=("<tool_call>", "<function_call>"),
        also_ends=("</tool_call>",),
        body=LIST,
        num_shared=1,
        between=", ",
    ),
    "phi4_mini": ToolFormat(
        opens=("functools",),
        also=("<|tool_call|>",),
        also_ends=("<|/tool_call|>",),
        body=LIST,
        num_shared=1,
        between=", ",
    ),
    "seed_oss": ToolFormat(
        opens=("<seed:tool_call>\n", "<function="),
        inner=("<function=",),
        body=tagged(SEED),
        closes=("</function>\n", "</seed:tool_call>"),
        between="\n",
    ),
    "olmo3": ToolFormat(
        opens=("<function_calls>\n",),
        body=PYTHON_LINES,
        closes=("\n</function_calls>",),
        num_shared=1,
        between="\n",
    ),
    "hunyuan": ToolFormat(
        opens=("<tool_calls>",),
        body=LIST,
        closes=("</tool_calls>",),
        num_shared=1,
        between=", ",
    ),
    "ernie45": ToolFormat(
        opens=("<tool_call>\n",),
        body=OBJECT,
        closes=("\n</tool_call>\n",),
        again=json_calls.HERMES_AGAIN,
    ),
    "step3": ToolFormat(
        opens=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>")
        + ("<steptml:invoke name=",),
        inner=("<steptml:invoke name=",),
        body=tagged(STEP),
        closes=("</steptml:invoke>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        num_shared=1,
    ),
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "xlam": ToolFormat(
        also=("```json", "[TOOL_CALLS]", "<tool_call>"),
        starts=("[",),
        is_bare=True,
        body=Body(read=json_calls.bare_list, whole=notations.bare_list),
        closes=("```", "</tool_call>"),
    ),
    "lfm2": ToolFormat(
        opens=("<|tool_call_start|>",),
        body=PYTHON_LIST,
        closes=("<|tool_call_end|>",),
        num_shared=1,
        between=", ",
    ),
}
# Format of required calls if the model's format is unknown or cannot express a schema. A grammar
# enforces it.
REQUIRED = ToolFormat(starts=("[",), body=Body(read=json_calls.required))
