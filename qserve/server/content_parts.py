"""The parts that a message's content is made of: text, and the refusal of an earlier answer.

Knows no roles: a message checks with `refusal_fits` that a refusal is the assistant's own.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

REFUSAL = "refusal"
ASSISTANT = "assistant"
INPUT_KINDS = ("text", "input_text", "output_text")  # of text, on /v1/responses


def _refusal(value: Any) -> Any:
    """A refusal has its text in another field than the other kinds."""
    if not isinstance(value, dict) or value.get("type") != REFUSAL:
        return value
    if not isinstance(value.get(REFUSAL), str):
        raise PydanticCustomError("part", "expected a part of type refusal with a text `refusal`")
    return {"type": REFUSAL, "text": value[REFUSAL]}


def _text_kind(kind: str) -> str:
    if kind not in ("text", REFUSAL):
        raise PydanticCustomError(
            "part", "expected a part of type text; this model reads text only"
        )
    return kind


def _input_kind(kind: str) -> str:
    if kind not in (*INPUT_KINDS, REFUSAL):
        raise PydanticCustomError("part", "expected a part of type input_text; only text is read")
    return kind


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str


class ChatPart(Part):
    type: Annotated[str, AfterValidator(_text_kind)]


class ResponsePart(Part):
    type: Annotated[str, AfterValidator(_input_kind)]


TextPart = Annotated[ChatPart, BeforeValidator(_refusal)]
InputPart = Annotated[ResponsePart, BeforeValidator(_refusal)]


def refusal_fits(role: str, parts: Sequence[Part] | None) -> None:
    """Raise PydanticCustomError for a refusal that is nobody's answer."""
    if role != ASSISTANT and any(part.type == REFUSAL for part in parts or ()):
        raise PydanticCustomError(
            "part", "expected parts of type refusal in messages of role assistant alone"
        )
