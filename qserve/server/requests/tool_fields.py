"""Fields for the tools of a chat, and for the tool calls in its history.

A model wrote the calls in the history, and the client can only send them back. So their names, ids
and arguments are not checked. Arguments that are not a JSON object are read as {}.
"""

import json
import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from qserve.server.requests.field_errors import field_error

MAX_TOOLS = 1024
MAX_CALLS = 1024  # per message
MAX_ARGUMENT_CHARS = 2**20
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")  # name of a tool


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise field_error("expected 1 to 128 letters, digits and the signs _ - .", "rename it")
    return value


def _arguments(value: Any) -> Any:
    is_short = isinstance(value, str) and len(value) <= MAX_ARGUMENT_CHARS
    if value is not None and not is_short and not isinstance(value, dict):
        raise field_error(
            f"expected the JSON text of an object, at most {MAX_ARGUMENT_CHARS} long",
            "send such a text",
        )
    return value


def read_arguments(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """Parse the arguments of a call. Returns {} for an empty text, None if it is not an object.

    Control characters inside strings, such as line breaks, are accepted.
    """
    if isinstance(value, dict):
        return value
    if value is None or not value.strip():
        return {}
    try:
        found = json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _parameters(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value and value.get("type", "object") != "object":
        raise field_error("expected a JSON schema of type object", 'set "type": "object"')
    return value


def _pattern(pattern: re.Pattern) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern.pattern}$"})


Name = Annotated[str, AfterValidator(_name), _pattern(NAME)]


PARAMETERS = WithJsonSchema(
    {
        "type": ["object", "null"],
        "properties": {"type": {"const": "object"}},
        "description": "A JSON schema of the arguments.",
    }
)


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class Function(Part):
    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_parameters), PARAMETERS] = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """JSON schema of the arguments. A tool without `parameters` takes an empty object."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object"} | self.parameters


class Tool(Part):
    type: Literal["function"]
    function: Function

    @property
    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True)
        return {"type": self.type, "function": function}


ARGUMENTS = {
    "type": ["string", "object", "null"],
    "contentMediaType": "application/json",
    "description": "The JSON text of an object. Other text is read as {}.",
}


class CalledFunction(Part):
    name: str
    arguments: Annotated[Any, BeforeValidator(_arguments), WithJsonSchema(ARGUMENTS)] = None

    @cached_property
    def object(self) -> dict[str, Any] | None:
        """The arguments; None: the text is not a JSON object."""
        return read_arguments(self.arguments)


class ToolCall(Part):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.object or {}}
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": self.type, "function": function}
