"""Tools and tool_choice of the Messages API."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from qserve.server.http.errors import ApiError
from qserve.server.requests.field_errors import field_error
from qserve.server.requests.protocol import Body
from qserve.server.requests.tool_fields import Name

CUSTOM = "custom"
# Types of tools that Anthropic's servers run, without the date: web_search_20250305 is one.
RUN_BY_SERVER = (
    *("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset"),
)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _object_schema(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise field_error("expected a JSON schema of type object", 'set "type": "object"')
    return value


class MessagesTool(Body):
    """A tool. A tool without an `input_schema` is one that Anthropic defines."""

    type: str | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(_object_schema)] | None = None
    strict: bool | None = None

    @property
    def runs_on_server(self) -> bool:
        return self.input_schema is None and (self.type or "").startswith(RUN_BY_SERVER)

    @property
    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def callable_tools(tools: list[MessagesTool] | None) -> list[tuple[int, MessagesTool]]:
    """Return the tools that the client runs, each with its index in the body.

    Tools that Anthropic's servers run are skipped. Raises ApiError(400), also if no tool is left.
    """
    found = []
    for index, tool in enumerate(tools or ()):
        if tool.runs_on_server:
            continue
        param = f"tools.{index}"
        if tool.input_schema is None:
            if tool.type not in (None, CUSTOM):
                raise ApiError(
                    400,
                    f"{param}.type: {tool.type[:100]} is a tool that only Anthropic's models know.",
                    "Define it with a name, a description and an input_schema.",
                    f"{param}.type",
                )
            raise ApiError(
                400, f"{param}.input_schema: expected a JSON schema.", "Add the schema.", param
            )
        if tool.name is None:
            raise ApiError(400, f"{param}.name: expected a name.", "Add one.", f"{param}.name")
        found.append((index, tool))
    if tools and not found:
        kinds = ", ".join(sorted({tool.type or "" for tool in tools}))
        raise ApiError(
            400,
            f"tools: expected a tool that the client runs, found {kinds:.300}, which need"
            " Anthropic's servers.",
            "Add a tool with a name and an input_schema.",
            "tools",
        )
    return found


def chat_tool_fields(tools: list[MessagesTool], choice: ToolChoice | None) -> dict[str, Any]:
    """Return the fields of the chat request for tools and tool_choice. Raises ApiError(400)."""
    if not tools:
        if choice is not None and choice.type not in ("auto", "none"):
            raise ApiError(400, "tool_choice: requires tools.", "Add one.", "tool_choice")
        return {}
    fields: dict[str, Any] = {"tools": [tool.for_chat for tool in tools]}
    if choice is None:
        return fields
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type != "tool":
        return fields | {"tool_choice": CHOICES[choice.type]}
    if choice.name is None:
        raise ApiError(
            400,
            "tool_choice.name: expected the name of a tool.",
            "Add one of the names in tools.",
            "tool_choice.name",
        )
    return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
