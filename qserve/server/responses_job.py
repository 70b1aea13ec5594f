"""Jobs of POST /v1/responses: text alone, and nothing is stored. Each becomes a chat's job."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from qserve.server import unsupported
from qserve.server.errors import ApiError
from qserve.server.job import Job, chat_request_job
from qserve.server.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    ONE_ERROR,
    Body,
    ChatCompletionRequest,
    at_most,
    check_role,
    read,
    validate,
)
from qserve.server.served_model import ServedModel

TEXT_PARTS = ("text", "input_text", "output_text")
# Of a chat's fields those that OpenAI's Responses have not; they mean the same here.
PASSED_ON = (
    *("model", "request_id", "user", "service_tier", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed"),
    *("min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("allowed_token_ids", "bad_words"),
    *("skip_special_tokens", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
    *("chat_template_kwargs", "priority", "stream", "structured_outputs"),
)
# field: the values that change nothing, besides null
REFUSED: dict[str, tuple] = unsupported.COMMON | {
    "background": (False,),
    "conversation": (),
    "echo": (False,),
    "include": ([],),
    "logprobs": (False,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "max_tool_calls": (),
    "messages": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "response_format": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# of an earlier answer's items, which clients send again
ITEM_FACTS: dict[str, tuple] = {"id": (), "status": ()}
HINTS = unsupported.HINTS | {
    "conversation": "nothing is stored here: send the conversation as input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use input",
    "previous_response_id": "nothing is stored here: send the conversation as input",
    "prompt": "use input",
    "response_format": "use text.format",
    "truncation": "use truncate_prompt_tokens",
}


def _text_part(kind: str) -> str:
    if kind not in TEXT_PARTS:
        raise PydanticCustomError("part", "expected a part of type input_text; only text is read")
    return kind


def _message(kind: str) -> str:
    if kind != "message":
        raise PydanticCustomError("item", "expected an item of type message; tools are not called")
    return kind


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class InputPart(Body):
    type: Annotated[str, AfterValidator(_text_part)]
    text: str


class InputItem(Body):
    type: Annotated[str, AfterValidator(_message)] = "message"
    role: Annotated[str, AfterValidator(check_role)]
    name: str | None = None  # a chat checks it
    content: Annotated[
        list[InputPart], ONE_ERROR, at_most(MAX_PARTS, "parts"), BeforeValidator(_as_parts)
    ]


class TextFormat(Body):
    """OpenAI writes a schema's name and text beside its type here."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    strict: bool | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def response_format(self) -> dict[str, Any]:
        """The same as a chat's field."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.json_schema}}


class TextSettings(Body):
    format: TextFormat | None = None


class ResponsesRequest(Body):
    """The body of POST /v1/responses; PASSED_ON names the fields that a chat checks."""

    input: Annotated[
        list[InputItem], ONE_ERROR, at_most(MAX_MESSAGES, "items"), BeforeValidator(_as_items)
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    text: TextSettings | None = None
    store: bool | None = None

    def as_chat(self) -> ChatCompletionRequest:
        """The same as a chat. Raises ApiError."""
        extra = self.model_extra or {}
        messages = [
            {
                "role": item.role,
                "name": item.name,
                "content": [{"type": "text", "text": part.text} for part in item.content],
            }
            for item in self.input
        ]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields = {name: extra[name] for name in PASSED_ON if name in extra}
        fields |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.response_format
        return validate(fields, ChatCompletionRequest)

    @property
    def ignored(self) -> list[str]:
        """The fields that are set and change nothing, by name."""
        table = dict.fromkeys((*REFUSED, *PASSED_ON))
        of_items = {
            name: None
            for item in self.input
            for name in unsupported.unknown(item.model_extra, ITEM_FACTS)
        }
        return [
            *["store"] * bool(self.store),
            *unsupported.unknown(self.model_extra, table),
            *(f"input.{name}" for name in of_items),
        ]


def responses_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /v1/responses. Raises ApiError and InputError."""
    request = read(body, ResponsesRequest)
    unsupported.refuse(request.model_extra, REFUSED, hints=HINTS)
    if not request.input:
        raise ApiError(400, "input: expected at least one message.", "input")
    limit = request.max_output_tokens
    if limit is not None and not 1 <= limit <= model.max_model_len:
        raise ApiError(
            400,
            f"max_output_tokens: expected 1 to {model.max_model_len}, found {limit}.",
            "max_output_tokens",
        )
    chat = request.as_chat()
    repeated = {
        "instructions": request.instructions,
        "max_output_tokens": limit,
        "metadata": request.metadata or {},
        "user": chat.user,
    }
    ignored = (*chat.ignored, *request.ignored)
    if request.text is not None and request.text.format is not None:
        repeated["text"] = {
            "format": request.text.format.model_dump(by_alias=True, exclude_none=True)
        }
    return chat_request_job(model, chat, arrived, "resp", ignored=ignored, repeated=repeated)
