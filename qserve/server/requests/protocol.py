"""Request models of completions and chats, and the validation of bodies.

Types are strict: "5" is not a number. SamplingParams and generation_params.py check numeric ranges.
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

from qserve.params.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_STOP_TOKEN_IDS,
)
from qserve.server.http.errors import ApiError
from qserve.server.http.framing import REQUEST_ID
from qserve.server.requests import unsupported
from qserve.server.requests.content_parts import ASSISTANT, THINKING, TextPart, check_parts_of_role
from qserve.server.requests.field_errors import as_field_error, field_error
from qserve.server.requests.tool_fields import MAX_CALLS, MAX_TOOLS, Tool, ToolCall

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # per message
MAX_NAME_CHARS = 256
# The server holds text back to search it for stop strings, so it limits their number, the
# characters of one, and the characters of all.
MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_ALL_STOP_CHARS = 32, 1024, 4096
MAX_TEMPERATURE = 2
MAX_TEMPLATE_SETTINGS = 64
EFFORT = "reasoning_effort"
# OpenAI's values, which chat templates get unchanged.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TOOL = "tool"
# The chat template gets roles unchanged, so only these are allowed.
ROLES = ("system", "developer", "user", ASSISTANT, TOOL)
# Roles whose messages may be empty: a reply may be cut, or have only calls or reasoning.
MAY_BE_EMPTY = (ASSISTANT, TOOL)
WHOLE_FLOAT = re.compile(rb"[0-9](?:\.0|[eE])")
ONE_ERROR = FailFast()  # stop at the first error: a list may have a million wrong items
CONTENT_FORMS = "text, or a list of parts of type text, image_url and video_url"
PROMPT_FORMS = "text, token ids, or a list of either"


def _prompts(value: Any) -> list[str | list[int]]:
    """Convert every form of `prompt` to a list of prompts, each text or token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list):
        raise field_error(f"expected {PROMPT_FORMS}", "send one of these")
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise field_error(
            f"expected 1 to {MAX_PROMPTS} prompts, found {len(value)}",
            "send several requests" if value else "add one",
        )
    for prompt in value:
        is_text = isinstance(prompt, str)
        if not is_text and not isinstance(prompt, list):
            raise field_error(f"expected {PROMPT_FORMS}", "send one of these")
        if not prompt:
            raise field_error("expected a prompt that is not empty", "write one")
        if not is_text and any(type(token) is not int for token in prompt):
            raise field_error(
                "expected token ids to be integers", "write them without quotes and fractions"
            )
    return value


def _not_empty(value: str | None) -> str | None:
    if value == "":
        raise field_error("expected a text that is not empty", "write one, or leave it out")
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
        raise field_error(f"expected {CONTENT_FORMS}", "send one of these")
    return value


def check_role(role: str) -> str:
    if role not in ROLES:
        raise field_error(f"expected one of {', '.join(ROLES)}", "use one of these")
    return role


def check_request_id(value: str | None) -> str | None:
    if value is not None and not REQUEST_ID.fullmatch(value):
        raise field_error(
            "expected 1 to 128 letters, digits and characters of . _ : / + = - @",
            "leave it out, or shorten it",
        )
    return value


def at_most(limit: int, what: str) -> BeforeValidator:
    """Return a validator of a value's length, which runs before its items are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, str | list | dict) and len(value) > limit:
            raise field_error(
                f"expected at most {limit} {what}, found {len(value)}",
                "shorten it" if isinstance(value, str) else "give fewer",
            )
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    # Keep unknown fields: unsupported.py refuses or ignores them.
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(Body):
    role: Annotated[str, AfterValidator(check_role)]
    content: Annotated[
        list[TextPart] | None, ONE_ERROR, at_most(MAX_PARTS, "parts"), BeforeValidator(_as_parts)
    ] = None
    name: Annotated[str | None, at_most(MAX_NAME_CHARS, "characters")] = None
    tool_calls: Annotated[list[ToolCall] | None, ONE_ERROR, at_most(MAX_CALLS, "calls")] = None
    tool_call_id: str | None = None  # for role tool: id of the call with this output
    reasoning_content: str | None = None  # reasoning of an earlier reply, if the template uses it
    reasoning: str | None = None  # vLLM's newer name of reasoning_content
    refusal: str | None = None  # text of an earlier reply, instead of `content`

    @model_validator(mode="after")
    def _check_parts(self) -> "Message":
        check_parts_of_role(self.role, self.content)
        return self

    @property
    def is_refusal(self) -> bool:
        """True if the message's text is in `refusal`, which counts for role assistant only."""
        return self.refusal is not None and self.role == ASSISTANT

    @property
    def has_media(self) -> bool:
        return any(part.media_url for part in self.content or ())

    @property
    def all_reasoning(self) -> str | None:
        """Reasoning of an earlier reply, from either field or from content parts."""
        for text in (self.reasoning_content, self.reasoning):
            if text is not None:
                return text
        thoughts = [part.text for part in self.content or () if part.type == THINKING]
        return "\n".join(filter(None, thoughts)) or None

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it.

        The content is one text; several texts are joined by newlines, as in vLLM. If there are
        images or videos, the content is a list of parts, without URLs.
        """
        parts = [part for part in self.content or () if part.type != THINKING]
        content: str | list[dict[str, str]]
        if any(part.media_url for part in parts):
            content = [
                {"type": part.kind} if part.media_url else {"type": "text", "text": part.text}
                for part in parts
            ]
        else:
            content = "\n".join([*(part.text for part in parts), *[self.refusal] * self.is_refusal])
        fields: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.all_reasoning is not None:
            fields["reasoning_content"] = self.all_reasoning
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template for call in self.tool_calls]
        return fields


class GenerationRequest(Body):
    """Fields of completions and chats. None: not set."""

    model: str | None = None
    request_id: Annotated[str | None, AfterValidator(check_request_id)] = None
    user: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: CacheSalt = None
    n: int | None = None
    # generation_params.py reads the next four fields
    use_beam_search: bool | None = None
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
    logit_bias: dict[str, Any] | None = None  # checked by SamplingParams
    # generation_params.py reads the next two fields
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    # Newer name of max_tokens in chats. OpenAI's completions ignore it and generate 16 tokens.
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
        """True if a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """True if each chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def ignored(self) -> list[str]:
        """Names of fields that the request sets and that have no effect."""
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
    tool_choice: Any = None  # see tool_use.py
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None  # false: the reply leaves reasoning out
    # chat.py reads the next two fields
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, at_most(MAX_TEMPLATE_SETTINGS, "settings")
    ] = None

    @property
    def broken_arguments(self) -> list[str]:
        """Names of fields with arguments of an earlier call that are not a JSON object."""
        return [
            f"messages.{index}.tool_calls.{number}.function.arguments"
            for index, message in enumerate(self.messages)
            for number, call in enumerate(message.tool_calls or ())
            if call.function.object is None
        ]

    @property
    def ignored(self) -> list[str]:
        """Names of fields that the request sets and that have no effect."""
        of_messages = {
            name: None
            for message in self.messages
            for name in (
                *unsupported.unknown(message.model_extra, unsupported.MESSAGE),
                *["refusal"] * (message.refusal is not None and not message.is_refusal),
                *["content.image_url.detail"] * any(p.has_detail for p in message.content or ()),
            )
        }
        return super().ignored + [f"messages.{name}" for name in of_messages]


AnyBody = TypeVar("AnyBody", bound=Body)
Request = TypeVar("Request", CompletionRequest, ChatCompletionRequest)


def read(body: bytes | bytearray, kind: type[AnyBody]) -> AnyBody:
    """Parse and validate a body's fields. Raises ApiError(400) that names the invalid field."""
    try:
        return kind.model_validate_json(body)
    except PydanticError as error:
        if not WHOLE_FLOAT.search(body):
            raise as_field_error(error) from None
    # In JSON, and in JSON schemas of type integer, 580.0 and 58e1 are integers.
    try:
        numbers = json.loads(body, parse_float=_whole)
        return kind.model_validate_json(json.dumps(numbers))
    except (ValueError, RecursionError) as error:
        if isinstance(error, PydanticError):
            raise as_field_error(error) from None
        raise ApiError(400, "The body is not valid JSON.", "Correct the body.") from None


def _whole(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def parse(body: bytes | bytearray, kind: type[Request]) -> Request:
    """Read a body like `read`, and check combinations of fields. Raises ApiError(400)."""
    request = read(body, kind)
    _check(request)
    return request


def validate(fields: dict[str, Any], kind: type[Request]) -> Request:
    """Validate a dict of fields as `parse` validates a body. Raises ApiError(400)."""
    try:
        request = kind.model_validate(fields)
    except PydanticError as error:
        raise as_field_error(error) from None
    _check(request)
    return request


def _check(request: GenerationRequest) -> None:
    """Raise ApiError(400) for unsupported fields, and for combinations that do not work."""
    is_chat = isinstance(request, ChatCompletionRequest)
    unsupported.refuse(request.model_extra, unsupported.TABLES[request.route])
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            400,
            "stream_options: requires stream: true.",
            "Set it, or leave stream_options out.",
            "stream_options",
        )
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(
            400,
            "prompt_logprobs: cannot be streamed.",
            "Use echo with logprobs, or no stream.",
            "prompt_logprobs",
        )
    if not is_chat:
        return
    if request.top_logprobs and not request.logprobs:
        raise ApiError(
            400,
            "top_logprobs: requires logprobs: true.",
            "Set it, or leave top_logprobs out.",
            "top_logprobs",
        )
    check_messages(request.messages)
    if request.continue_final_message and request.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt cannot both be set.",
            "Set only one of them.",
            "continue_final_message",
        )


def check_messages(messages: list[Message]) -> None:
    """Raise ApiError(400) for an empty list of messages, and for an invalid message."""
    if not messages:
        raise ApiError(
            400, "messages: expected at least one message.", "Add a message.", "messages"
        )
    for index, message in enumerate(messages):
        unsupported.refuse(
            message.model_extra,
            unsupported.MESSAGE,
            f"messages.{index}.",
            unsupported.MESSAGE_HINTS,
        )
        if message.tool_calls and message.role != ASSISTANT:
            name = f"messages.{index}.tool_calls"
            raise ApiError(
                400,
                f"{name}: allowed only in messages of role assistant.",
                "Leave tool_calls out.",
                name,
            )
        if message.content is None and message.role not in MAY_BE_EMPTY:
            name = f"messages.{index}.content"
            raise ApiError(400, f"{name}: expected {CONTENT_FORMS}.", "Add it.", name)
