"""The fields of tools in a chat's body: what they are, and the calls in a conversation's history.

Knows no parsers and no engine.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_ARGUMENT_CHARS = 2**20
# Names and ids go into the template as they are.
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
CALL_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise PydanticCustomError("name", "expected 1 to 128 letters, digits and the signs _ - .")
    return value


def _call_id(value: str) -> str:
    if not CALL_ID.fullmatch(value):
        raise PydanticCustomError("id", "expected 1 to 128 letters, digits and the signs _ - . :")
    return value


def _arguments(value: Any) -> Any:
    """The JSON text of an object as the object, which is what templates read."""
    if not isinstance(value, str) or len(value) > MAX_ARGUMENT_CHARS:
        raise PydanticCustomError(
            "arguments", f"expected the JSON text of an object, at most {MAX_ARGUMENT_CHARS} long"
        )
    try:
        found = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PydanticCustomError("arguments", "expected the JSON text of an object")
    return found


def _parameters(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value and value.get("type", "object") != "object":
        raise PydanticCustomError("parameters", "expected a JSON schema of type object")
    return value


def _pattern(pattern: re.Pattern) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern.pattern}$"})


Name = Annotated[str, AfterValidator(_name), _pattern(NAME)]
CallId = Annotated[str, AfterValidator(_call_id), _pattern(CALL_ID)]


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
        """Of a tool that states none: an empty object."""
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
    "type": "string",
    "contentMediaType": "application/json",
    "description": "The JSON text of an object.",
}


class CalledFunction(Part):
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments), WithJsonSchema(ARGUMENTS)]


class ToolCall(Part):
    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}
