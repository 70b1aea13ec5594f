"""ToolUse: the tools that a chat may or must call, for the chat template and the grammar."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from qserve.errors import ParameterError
from qserve.output_parsing.grammars.call_grammar import CallGrammar
from qserve.output_parsing.grammars.call_schema import list_schema
from qserve.output_parsing.grammars.format_grammar import lark, lark_in_text
from qserve.output_parsing.grammars.text_grammar import Inexpressible
from qserve.output_parsing.output_parser import HARMONY
from qserve.output_parsing.reasoning_formats import REASONING_PARSERS
from qserve.output_parsing.tool_format import ToolFormat
from qserve.output_parsing.tool_formats import TOOL_PARSERS
from qserve.server.http.errors import ApiError
from qserve.server.requests.protocol import ChatCompletionRequest
from qserve.server.requests.served_model import ServedModel
from qserve.server.requests.tool_fields import Tool
from qserve.structured.grammar import check_grammar, json_rule
from qserve.structured.params import StructuredOutputsParams

NONE, AUTO, REQUIRED, NAMED = "none", "auto", "required", "named"
CHOICE = "tool_choice"
NAMED_FORM = '{"type": "function", "function": {"name": ...}}'
# At most one space, since a weak model would generate line breaks up to the token limit.
WHITESPACE = " "
MODES = (NONE, AUTO, REQUIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    mode: str = NONE
    tools: tuple[Tool, ...] = ()  # callable tools
    is_single: bool = False  # at most one call
    has_form: bool = False  # the request has a response_format or structured_outputs

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Tool name -> JSON schema of the arguments."""
        return {tool.function.name: tool.function.schema_of_arguments for tool in self.tools}

    @property
    def named(self) -> str | None:
        return self.tools[0].function.name if self.mode == NAMED else None

    @property
    def is_forced(self) -> bool:
        """True if the model must call a tool."""
        return self.mode in (REQUIRED, NAMED)

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        return [tool.for_template for tool in self.tools] or None

    @property
    def is_strict(self) -> bool:
        """True if a tool has `strict: true`: its arguments must fit the schema."""
        return any(tool.function.strict for tool in self.tools)

    def ignored(self, model: ServedModel, form: StructuredOutputsParams | None) -> list[str]:
        """Return the names of fields without effect. `form`: grammar of the output."""
        if self.is_forced:
            return ["response_format"] * self.has_form
        if self.mode != AUTO:
            return []
        found = [] if model.tokenizer.reads_tools else ["tools"]
        return found + ["tools.function.strict"] * (self.is_strict and form is None)

    def form(self, model: ServedModel) -> StructuredOutputsParams:
        """Return the grammar for required calls, in the model's own format or as JSON.

        JSON is for models without a known format, and for schemas that the format cannot express.
        Raises ApiError for schemas that cannot be compiled.
        """
        for name in self.schemas:
            self._check(name)
        try:
            if self.mode == NAMED:
                form = _form(self.schemas[self.named])
            else:
                form = _form(list_schema(self.schemas, "parameters", is_single=self.is_single))
            return self._own(form, model, lark) or form
        except ParameterError as error:
            raise ApiError.relayed(
                400, f"tools: {error.problem} ({error.remedy}).", "tools"
            ) from None

    def strict_form(self, model: ServedModel) -> StructuredOutputsParams | None:
        """Return the grammar for tool_choice auto with strict tools: free text, and valid calls.

        None: no tool is strict, or the model's format cannot express the schema.
        """
        if self.mode != AUTO or not self.is_strict:
            return None
        free = frozenset(tool.function.name for tool in self.tools if not tool.function.strict)
        try:
            return self._own(StructuredOutputsParams(json_object=True), model, lark_in_text, free)
        except (ParameterError, ApiError):
            return None

    def _own(
        self,
        form: StructuredOutputsParams,
        model: ServedModel,
        rules: Callable[[CallGrammar, ToolFormat], str],
        free: frozenset[str] = frozenset(),
    ) -> StructuredOutputsParams | None:
        """Return `form` with the grammar of the model's own format; None if that is impossible."""
        row = tool_format(model)
        if row is None:
            return None
        try:
            own = replace(form, calls=rules(self._grammar(model, free), row), only_calls=True)
            check_grammar(own)
        except (Inexpressible, ParameterError):
            return None
        return own

    def _grammar(self, model: ServedModel, free: frozenset[str]) -> CallGrammar:
        """Return the building blocks of a grammar. `free`: names of tools with any arguments."""
        row = tool_format(model)
        is_single = self.is_single or self.mode == NAMED or (row is not None and row.only_one)
        anything = {"type": "object"}
        return CallGrammar(
            tools={
                name: anything if name in free else schema for name, schema in self.schemas.items()
            },
            is_single=is_single,
            as_json=lambda schema: json_rule(_form(schema), schema),
            marker_token=model.tokenizer.marker_token,
            free=free,
        )

    def choice(self, asked: StructuredOutputsParams, model: ServedModel) -> StructuredOutputsParams:
        """Return the grammar for the requested form, or else calls in the model's format.

        Raises ApiError for schemas that cannot be compiled.
        """
        row = TOOL_PARSERS[model.auto_tool_parser]
        free = frozenset(
            tool.function.name for tool in self.tools if not self._is_held(tool, model)
        )
        try:
            form = replace(asked, calls=lark(self._grammar(model, free), row))
            check_grammar(form)
        except (Inexpressible, ParameterError) as error:
            problem = error.problem if isinstance(error, ParameterError) else str(error)
            message = f"tools: {problem}, together with response_format."
            raise ApiError(
                400, message, "Leave one of the two out, or simplify the tools' schemas.", "tools"
            ) from None
        return form

    def _is_held(self, tool: Tool, model: ServedModel) -> bool:
        """Return True if a grammar can enforce the schema of a tool's arguments.

        If it cannot and the tool is strict, raises ApiError.
        """
        name, row = tool.function.name, TOOL_PARSERS[model.auto_tool_parser]
        try:
            self._check(name)
            lark(replace(self, tools=(tool,))._grammar(model, frozenset()), row)
        except ApiError:
            if tool.function.strict:
                raise
            return False
        except Inexpressible as error:
            if tool.function.strict:
                param = f"tools.{list(self.schemas).index(name)}.function.parameters"
                raise ApiError(
                    400,
                    f"{param} of {name}: {error}.",
                    "Simplify the schema, or leave strict out.",
                    param,
                ) from None
            return False
        return True

    def _check(self, name: str) -> None:
        """Raise ApiError if a tool's schema cannot be compiled."""
        param = f"tools.{list(self.schemas).index(name)}.function.parameters"
        try:
            check_grammar(StructuredOutputsParams(json=self.schemas[name]))
        except ParameterError as error:
            raise ApiError.relayed(
                400, f"{param} of {name}: {error.problem} ({error.remedy}).", param
            ) from None


def tool_format(model: ServedModel) -> ToolFormat | None:
    """Return the format in which the model writes calls; None: unknown."""
    if model.auto_tool_parser is not None:
        return TOOL_PARSERS[model.auto_tool_parser]
    # A model with reasoning in Harmony's format also writes its calls in this format.
    reasoning = REASONING_PARSERS.get(model.reasoning_parser)
    return TOOL_PARSERS[HARMONY] if reasoning is not None and reasoning.is_harmony else None


def tool_use(
    request: ChatCompletionRequest, model: ServedModel, *, generates: bool = True
) -> ToolUse:
    """Read the tool fields of a request. Raises ApiError(400).

    `generates`: False if only the prompt is needed, so that no call has to be parsed.
    """
    tools = request.tools
    mode, names = _mode(request.tool_choice, AUTO if tools else NONE)
    if not tools:
        # Clients that send `tools` with every request send [] and "auto" if they have none.
        if mode != NONE and (mode != AUTO or names is not None or tools is None):
            raise ApiError(
                400,
                "tool_choice: requires at least one tool.",
                "Add a tool, or omit the field.",
                CHOICE,
            )
        return ToolUse()
    known: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        name, param = tool.function.name, f"tools.{index}.function"
        if name in known:
            raise ApiError(
                400,
                f"{param}.name: duplicate name {name}.",
                "Rename one of the tools.",
                f"{param}.name",
            )
        known[name] = tool
        try:
            # Checks size and depth only. A grammar is compiled only for required or strict calls.
            StructuredOutputsParams(json=tool.function.schema_of_arguments)
        except ParameterError as error:
            param = f"{param}.parameters"
            raise ApiError.relayed(
                400, f"{param}: {error.problem} ({error.remedy}).", param
            ) from None
    for name in names or ():
        if name not in known:
            shown = ", ".join(known)
            raise ApiError(
                400,
                f"tool_choice: expected one of the tools {shown:.500}, found {name}.",
                "Use one of these names, or add the tool.",
                CHOICE,
            )
    if mode == NONE:
        return ToolUse()
    if generates and mode == AUTO and model.auto_tool_parser is None:
        raise ApiError(
            400,
            'tool_choice: "auto", the default with tools, requires a server that knows the format'
            " of the model's calls.",
            "Start it with --tool-call-parser NAME, without --no-enable-auto-tool-choice;"
            ' "required" and a named tool work without it.',
            CHOICE,
        )
    has_form = (request.response_format or {}).get("type", "text") != "text"
    if request.structured_outputs is not None:
        if mode in (REQUIRED, NAMED):
            message = "structured_outputs: cannot be combined with a required tool call."
            raise ApiError(400, message, "Leave one of the two out.", "structured_outputs")
        has_form = True
    return ToolUse(
        mode=mode,
        tools=tuple(known[name] for name in names) if names else tuple(tools),
        is_single=request.parallel_tool_calls is False,
        has_form=has_form,
    )


def _mode(choice: Any, default: str) -> tuple[str, list[str] | None]:
    """Return the mode of a tool_choice, and the names of the allowed tools; None: all tools."""
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
        "Use one of these.",
        CHOICE,
    )


def _form(schema: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, whitespace_pattern=WHITESPACE)
