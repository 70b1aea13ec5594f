"""Input items of POST /v1/responses, and their conversion to a chat's messages."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag, model_validator

from qserve.params.parameter_types import shown
from qserve.server.requests.content_parts import InputPart, ResponsePart, check_parts_of_role
from qserve.server.requests.field_errors import field_error
from qserve.server.requests.protocol import MAX_PARTS, ONE_ERROR, Body, at_most, check_role

ITEMS = ("message", "function_call", "function_call_output", "reasoning")
AN_ITEM = f"expected an item of type {', '.join(ITEMS[:-1])} or {ITEMS[-1]}"
TAG_OF_ITEM = re.compile(
    r"^((?:input|items)\.\d+)\.(message|function_call|function_call_output|reasoning)\b"
)


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _nothing_as_empty(value: Any) -> Any:
    return "" if value is None else value


Parts = Annotated[
    list[InputPart], ONE_ERROR, at_most(MAX_PARTS, "parts"), BeforeValidator(_as_parts)
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Annotated[str, AfterValidator(check_role)]
    name: str | None = None  # checked by the chat model
    content: Parts

    @model_validator(mode="after")
    def _check_parts(self) -> "InputMessage":
        check_parts_of_role(self.role, self.content)
        return self


class CallItem(Body):
    """A tool call of an earlier reply. The chat model checks its fields."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutput(Body):
    """Output of a called tool."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Parts, BeforeValidator(_nothing_as_empty)]

    @model_validator(mode="after")
    def _check_parts(self) -> "CallOutput":
        check_parts_of_role("tool", self.output)
        return self


class ReasoningItem(Body):
    """Reasoning of an earlier reply. It is not part of the prompt."""

    type: Literal["reasoning"]


def kind_of(item: Any) -> str:
    """Return the type of an item. Messages may omit their type."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else ""


def _stated(item: Any) -> Any:
    if isinstance(item, dict) and item.get("type") == "item_reference":
        raise field_error(
            "expected the item itself, found a reference, which needs a server started with"
            " --response-store",
            "set store: false in the client, which then sends whole items",
        )
    if isinstance(item, dict) and isinstance(item.get("type"), str) and item["type"] not in ITEMS:
        raise field_error(f"{AN_ITEM}, found {shown(item['type'])}", "use one of these types")
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(kind_of, custom_error_type="item", custom_error_message=AN_ITEM),
    BeforeValidator(_stated),
]


def chat_messages(items: list[Any]) -> list[dict[str, Any]]:
    """Convert items to chat messages. Calls join the assistant's message before them, if any."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, ReasoningItem):
            continue
        if isinstance(item, CallItem):
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant":
                last = {"role": "assistant", "content": None}
                messages.append(last)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            last["tool_calls"] = [*last.get("tool_calls", ()), call]
            continue
        is_output = isinstance(item, CallOutput)
        parts = item.output if is_output else item.content
        content = list(map(_chats_part, parts))
        whose = {"role": "tool", "tool_call_id": item.call_id} if is_output else {}
        named = {} if is_output else {"role": item.role, "name": item.name}
        messages.append({**whose, **named, "content": content})
    return messages


def _chats_part(part: ResponsePart) -> dict[str, Any]:
    """Convert a content part to the chat's form."""
    if part.media_url is None:
        return {"type": "text", "text": part.text}
    kind = f"{part.kind}_url"
    return {"type": kind, kind: part.media_url}
