"""The bodies of requests: fields, types, and which of them are set. Knows no tokens and no engine.

Types are strict: "5" is no number. Numeric ranges are SamplingParams' to check.
"""

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    WithJsonSchema,
    model_validator,
)
from pydantic import ValidationError as PydanticError
from pydantic_core import PydanticCustomError

from qserve.parameter_types import (
    A_FLAG,
    A_LIST,
    A_NUMBER,
    A_TEXT,
    AN_INTEGER,
    AN_OBJECT,
    wrong_type,
)
from qserve.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from qserve.server import unsupported
from qserve.server.content_parts import ASSISTANT, TextPart, refusal_fits
from qserve.server.errors import ApiError
from qserve.server.tool_fields import MAX_CALLS, MAX_TOOLS, CallId, Tool, ToolCall

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_NAME_CHARS = 256
MAX_TEMPLATE_SETTINGS = 64
# A client's name of its request. It goes into logs and headers.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
EFFORT = "reasoning_effort"
# OpenAI's; a template that reads one gets it as it is.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# A role goes into the template as it is, so it is one of these.
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
WHOLE_FLOAT = re.compile(rb"[0-9](?:\.0|[eE])")
ONE_ERROR = FailFast()  # a list of a million wrong items makes one error, not a million
# pydantic's names of what is wrong with a type
EXPECTED = {
    "bool_type": A_FLAG,
    "dict_type": AN_OBJECT,
    "float_type": A_NUMBER,
    "int_from_float": AN_INTEGER,
    "int_type": AN_INTEGER,
    "list_type": A_LIST,
    "model_type": AN_OBJECT,
    "string_type": A_TEXT,
}
CONTENT_FORMS = "text, or a list of parts of type text"
PROMPT_FORMS = "text, token ids, or a list of either"


def _prompts(value: Any) -> list[str | list[int]]:
    """All forms of `prompt` as a list of prompts, each text or token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", f"expected {PROMPT_FORMS}")
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise PydanticCustomError(
            "prompt", f"expected 1 to {MAX_PROMPTS} prompts, found {len(value)}"
        )
    for prompt in value:
        is_text = isinstance(prompt, str)
        if not is_text and not isinstance(prompt, list):
            raise PydanticCustomError("prompt", f"expected {PROMPT_FORMS}")
        if not prompt:
            raise PydanticCustomError("prompt", "expected no empty prompt")
        if not is_text and any(type(token) is not int for token in prompt):
            raise PydanticCustomError("prompt", "expected token ids to be integers")
    return value


def _template_setting(value: Any) -> bool | int | float | str | None:
    if value is not None and not isinstance(value, bool | int | float | str):
        raise PydanticCustomError("setting", "expected a flag, a number or a text")
    return value


TemplateSetting = Annotated[Any, BeforeValidator(_template_setting)]


def _not_empty(value: str | None) -> str | None:
    if value == "":
        raise PydanticCustomError("text", "expected no empty text")
    return value


CacheSalt = Annotated[
    str | None,
    AfterValidator(_not_empty),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}),
]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _unless_false(value: Any) -> Any:
    return None if value is False else value


def _as_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is not None and not isinstance(value, list):
        raise PydanticCustomError("content", f"expected {CONTENT_FORMS}")
    return value


def check_role(role: str) -> str:
    if role not in ROLES:
        raise PydanticCustomError("role", f"expected one of {', '.join(ROLES)}")
    return role


def check_request_id(value: str | None) -> str | None:
    if value is not None and not REQUEST_ID.fullmatch(value):
        raise PydanticCustomError(
            "request_id", "expected 1 to 128 letters, digits and the signs . _ : / + = - @"
        )
    return value


def at_most(limit: int, what: str) -> BeforeValidator:
    """Checks a length before the items are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, str | list | dict) and len(value) > limit:
            raise PydanticCustomError(
                "length", f"expected at most {limit} {what}, found {len(value)}"
            )
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    # Unknown fields are kept, so that those of the tables in unsupported.py can be found.
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(Body):
    role: Annotated[str, AfterValidator(check_role)]
    # Only a message with tool calls, or with a refusal, may have none.
    content: Annotated[
        list[TextPart] | None, ONE_ERROR, at_most(MAX_PARTS, "parts"), BeforeValidator(_as_parts)
    ] = None
    name: Annotated[str | None, at_most(MAX_NAME_CHARS, "characters")] = None
    tool_calls: Annotated[list[ToolCall] | None, ONE_ERROR, at_most(MAX_CALLS, "calls")] = None
    tool_call_id: CallId | None = None  # of the call that a message of role tool answers
    reasoning_content: str | None = None  # of an earlier answer, for templates that read it
    reasoning: str | None = None  # vLLM's newer name of it
    refusal: str | None = None  # the text of an earlier answer, in place of its content

    @model_validator(mode="after")
    def _check_refusal(self) -> "Message":
        refusal_fits(self.role, self.content)
        return self

    @property
    def is_refusal(self) -> bool:
        """Whether `refusal` is the message's text; another's than the assistant's means nothing."""
        return self.refusal is not None and self.role == ASSISTANT

    @property
    def for_template(self) -> dict[str, Any]:
        """The form that chat templates read; parts are joined by newlines, as in vLLM."""
        texts = [part.text for part in self.content or ()]
        texts += [self.refusal] * self.is_refusal
        fields: dict[str, Any] = {"role": self.role, "content": "\n".join(texts)}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            fields["reasoning_content"] = reasoning
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template for call in self.tool_calls]
        return fields


class GenerationRequest(Body):
    """What both routes take. None is a field that is not set."""

    model: str | None = None
    request_id: Annotated[str | None, AfterValidator(check_request_id)] = None
    user: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: CacheSalt = None
    n: int | None = None
    use_beam_search: bool | None = None  # beam_fields.py reads it, and the next three
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None  # SamplingParams checks it
    response_format: dict[str, Any] | None = None  # output_form.py reads it, and the next
    structured_outputs: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    # The chat's newer name for it. Completions have it nowhere else, where who sends it gets 16.
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[
        list[Annotated[str, at_most(MAX_STOP_CHARS, "characters")]] | None,
        ONE_ERROR,
        at_most(MAX_STOP_STRINGS, "strings"),
        BeforeValidator(_as_list),
    ] = None
    stop_token_ids: Annotated[list[int] | None, ONE_ERROR, at_most(MAX_STOP_TOKEN_IDS, "ids")] = (
        None
    )
    allowed_token_ids: Annotated[
        list[int] | None, ONE_ERROR, at_most(MAX_ALLOWED_TOKEN_IDS, "ids")
    ] = None
    bad_words: Annotated[
        list[Annotated[str, at_most(MAX_BAD_WORD_CHARS, "characters")]] | None,
        ONE_ERROR,
        at_most(MAX_BAD_WORDS, "words"),
    ] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def ignored(self) -> list[str]:
        """The fields that are set and change nothing, by name."""
        table = unsupported.TABLES[self.route]
        found = [name for name in unsupported.WITHOUT_EFFECT if getattr(self, name) is not None]
        found += unsupported.unknown(self.model_extra, table)
        if self.stream_options is not None:
            extra = unsupported.unknown(self.stream_options.model_extra, {})
            found += [f"stream_options.{name}" for name in extra]
        return found


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    route: ClassVar[str] = "completions"

    prompt: Annotated[Any, AfterValidator(_prompts)]
    logprobs: Annotated[int | None, BeforeValidator(_unless_false)] = None
    echo: bool | None = None


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    route: ClassVar[str] = "chat"

    messages: Annotated[list[Message], ONE_ERROR, at_most(MAX_MESSAGES, "messages")]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool] | None, ONE_ERROR, at_most(MAX_TOOLS, "tools")] = None
    tool_choice: Any = None  # tool_use.py reads it
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None  # template_settings.py reads it, and the next
    # numbers, texts and flags alone: a template's own loops are then all that takes time
    chat_template_kwargs: Annotated[
        dict[str, TemplateSetting] | None, at_most(MAX_TEMPLATE_SETTINGS, "settings")
    ] = None

    @property
    def ignored(self) -> list[str]:
        """The fields that are set and change nothing, by name."""
        of_messages = {
            name: None
            for message in self.messages
            for name in (
                *unsupported.unknown(message.model_extra, unsupported.MESSAGE),
                *["refusal"] * (message.refusal is not None and not message.is_refusal),
            )
        }
        return super().ignored + [f"messages.{name}" for name in of_messages]


AnyBody = TypeVar("AnyBody", bound=Body)
Request = TypeVar("Request", CompletionRequest, ChatCompletionRequest)


def read(body: bytes | bytearray, kind: type[AnyBody]) -> AnyBody:
    """Read a body, field by field. Raises ApiError(400) that names the field at fault."""
    try:
        return kind.model_validate_json(body)
    except PydanticError as error:
        if not WHOLE_FLOAT.search(body):
            raise _api_error(error) from None
    # 580.0 and 58e1 are integers to JSON, and to a schema that says "integer".
    try:
        numbers = json.loads(body, parse_float=_whole)
        return kind.model_validate_json(json.dumps(numbers))
    except (ValueError, RecursionError) as error:
        if isinstance(error, PydanticError):
            raise _api_error(error) from None
        raise ApiError(400, "The body is no valid JSON.") from None


def _whole(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def parse(body: bytes | bytearray, kind: type[Request]) -> Request:
    """Read a body, and check what holds between its fields. Raises ApiError(400)."""
    request = read(body, kind)
    _check(request)
    return request


def validate(fields: dict[str, Any], kind: type[Request]) -> Request:
    """`parse` for fields that have been read."""
    try:
        request = kind.model_validate(fields)
    except PydanticError as error:
        raise _api_error(error) from None
    _check(request)
    return request


def _check(request: GenerationRequest) -> None:
    """What holds between fields, and what is not supported."""
    is_chat = isinstance(request, ChatCompletionRequest)
    unsupported.refuse(request.model_extra, unsupported.TABLES[request.route])
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: expected only with stream: true.", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(
            400,
            "prompt_logprobs: expected without stream; echo with logprobs can be streamed.",
            "prompt_logprobs",
        )
    if not is_chat:
        return
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs: expected only with logprobs: true.", "top_logprobs")
    if not request.messages:
        raise ApiError(400, "messages: expected at least one message.", "messages")
    for index, message in enumerate(request.messages):
        unsupported.refuse(message.model_extra, unsupported.MESSAGE, f"messages.{index}.")
        if message.tool_calls and message.role != ASSISTANT:
            name = f"messages.{index}.tool_calls"
            raise ApiError(400, f"{name}: expected in messages of role assistant alone.", name)
        if message.content is None and not message.tool_calls and not message.is_refusal:
            name = f"messages.{index}.content"
            raise ApiError(400, f"{name}: expected {CONTENT_FORMS}.", name)
    if request.continue_final_message and request.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other.",
            "continue_final_message",
        )


def _api_error(error: PydanticError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    problem = first["msg"]
    if first["type"] in EXPECTED:
        problem = wrong_type(EXPECTED[first["type"]], first["input"])
    message = problem if param is None else f"{param}: {problem}"
    return ApiError(400, message, param)
