"""ToolUse: which tools a chat may or must call, what the template and the grammar see of them."""

from dataclasses import dataclass
from typing import Any

from qserve.errors import ParameterError
from qserve.server.errors import ApiError
from qserve.server.protocol import ChatCompletionRequest
from qserve.server.served_model import ServedModel
from qserve.server.tool_fields import Tool
from qserve.structured.grammar import check_grammar
from qserve.structured.params import StructuredOutputsParams

NONE, AUTO, REQUIRED, NAMED = "none", "auto", "required", "named"
CHOICE = "tool_choice"
NAMED_FORM = '{"type": "function", "function": {"name": ...}}'
# At most one space: a weak model fills a call with line breaks until its limit.
WHITESPACE = " "
MODES = (NONE, AUTO, REQUIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    mode: str = NONE
    tools: tuple[Tool, ...] = ()  # those that may be called
    is_single: bool = False  # at most one call

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schemas of the arguments, by the tool's name."""
        return {tool.function.name: tool.function.schema_of_arguments for tool in self.tools}

    @property
    def named(self) -> str | None:
        return self.tools[0].function.name if self.mode == NAMED else None

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        return [tool.for_template for tool in self.tools] or None

    def ignored(self, model: ServedModel) -> list[str]:
        """What changes nothing of what was asked, by name."""
        if self.mode != AUTO:
            return []
        found = [] if model.tokenizer.reads_tools else ["tools"]
        is_strict = any(tool.function.strict for tool in self.tools)
        return found + ["tools.function.strict"] * is_strict

    def form(self) -> StructuredOutputsParams | None:
        """What holds the model to calls. Raises ApiError for schemas that cannot."""
        if self.mode not in (REQUIRED, NAMED):
            return None
        for index, (name, schema) in enumerate(self.schemas.items()):
            param = f"tools.{index}.function.parameters"
            try:
                check_grammar(StructuredOutputsParams(json=schema))
            except ParameterError as error:
                raise ApiError(400, f"{param} of {name}: {error.problem}.", param) from None
        if self.mode == NAMED:
            return _form(self.schemas[self.named])
        try:
            return _form(_list_schema(self.schemas, self.is_single))
        except ParameterError as error:
            raise ApiError(400, f"tools: {error.problem}.", "tools") from None


def tool_use(request: ChatCompletionRequest, model: ServedModel) -> ToolUse:
    """What the fields ask for. Raises ApiError(400)."""
    tools = request.tools
    if tools is not None and not tools:
        raise ApiError(400, "tools: expected at least one tool, or no such field.", "tools")
    mode, names = _mode(request.tool_choice, AUTO if tools else NONE)
    if not tools:
        if mode != NONE:
            raise ApiError(400, "tool_choice: expected only with tools.", CHOICE)
        return ToolUse()
    known: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        name, param = tool.function.name, f"tools.{index}.function"
        if name in known:
            raise ApiError(400, f"{param}.name: {name} is there twice.", f"{param}.name")
        known[name] = tool
        try:
            # Sizes and depths; a grammar is made of it only where calls are required.
            StructuredOutputsParams(json=tool.function.schema_of_arguments)
        except ParameterError as error:
            param = f"{param}.parameters"
            raise ApiError(400, f"{param}: {error.problem}.", param) from None
    for name in names or ():
        if name not in known:
            shown = ", ".join(known)
            raise ApiError(
                400, f"tool_choice: expected one of the tools {shown:.500}, found {name}.", CHOICE
            )
    if mode == NONE:
        return ToolUse()
    if mode == AUTO and model.auto_tool_parser is None:
        raise ApiError(
            400,
            'tool_choice: "auto", which tools imply, needs a server started with'
            ' --enable-auto-tool-choice and --tool-call-parser; "required" and a named tool do'
            " not.",
            CHOICE,
        )
    _check_form(request, mode)
    return ToolUse(
        mode=mode,
        tools=tuple(known[name] for name in names) if names else tuple(tools),
        is_single=request.parallel_tool_calls is False,
    )


def _mode(choice: Any, default: str) -> tuple[str, list[str] | None]:
    """How tools are chosen, and of which if not of all."""
    if choice is None:
        return default, None
    if isinstance(choice, str) and choice in MODES:
        return choice, None
    if isinstance(choice, dict) and choice.get("type") == "function":
        return NAMED, [_name_in(choice)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if isinstance(allowed, dict) and allowed.get("mode") in (AUTO, REQUIRED):
            tools = allowed.get("tools")
            if isinstance(tools, list) and tools:
                return allowed["mode"], list(dict.fromkeys(map(_name_in, tools)))
    raise _wrong_choice()


def _name_in(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong_choice()
    return name


def _wrong_choice() -> ApiError:
    return ApiError(
        400,
        f"tool_choice: expected none, auto, required, or an object such as {NAMED_FORM}.",
        CHOICE,
    )


def _check_form(request: ChatCompletionRequest, mode: str) -> None:
    """Calls that are required are a form themselves."""
    has_form = (request.response_format or {}).get("type", "text") != "text"
    if mode in (REQUIRED, NAMED) and (has_form or request.structured_outputs is not None):
        name = "response_format" if has_form else "structured_outputs"
        raise ApiError(400, f"{name}: expected without a tool that has to be called.", name)


def _form(schema: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, whitespace_pattern=WHITESPACE)


def _list_schema(schemas: dict[str, dict[str, Any]], is_single: bool) -> dict[str, Any]:
    """A list of calls. Each tool's schema is a definition, to which its references are moved."""
    definitions = {
        str(index): _moved(schema, f"#/$defs/{index}")
        for index, schema in enumerate(schemas.values())
    }
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "parameters": {"$ref": f"#/$defs/{index}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, name in enumerate(schemas)
    ]
    items = {"anyOf": calls} if len(calls) > 1 else calls[0]
    most = {"maxItems": 1} if is_single else {}
    return {"$defs": definitions, "type": "array", "items": items, "minItems": 1, **most}


def _moved(value: Any, to: str) -> Any:
    if isinstance(value, list):
        return [_moved(each, to) for each in value]
    if not isinstance(value, dict):
        return value
    copy = {name: _moved(each, to) for name, each in value.items() if name != "$schema"}
    reference = copy.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = to + reference[1:]
    return copy
