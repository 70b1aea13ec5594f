"""Request model of POST /v1/responses, and its conversion to a chat request and a job.

/v1/responses/input_tokens takes the same bodies.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from qserve.server.http.errors import ApiError
from qserve.server.requests import unsupported
from qserve.server.requests.chat import chat_request_job, chat_tokens, cut_chat_tokens
from qserve.server.requests.content_parts import ResponsePart
from qserve.server.requests.field_errors import field_error
from qserve.server.requests.input_items import (
    TAG_OF_ITEM,
    CallItem,
    InputItem,
    chat_messages,
    kind_of,
)
from qserve.server.requests.job import Arrival, Job
from qserve.server.requests.protocol import (
    EFFORT,
    MAX_MESSAGES,
    ONE_ERROR,
    Body,
    ChatCompletionRequest,
    Effort,
    at_most,
    read,
    validate,
)
from qserve.server.requests.served_model import ServedModel
from qserve.server.requests.tool_fields import MAX_TOOLS, Function, read_arguments
from qserve.server.requests.tool_use import NAMED_FORM as CHATS_FORM
from qserve.server.requests.tool_use import tool_use

# Chat fields that OpenAI's Responses API lacks. Here they are accepted with the same meaning.
PASSED_ON = (
    *("model", "request_id", "user", "service_tier", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed"),
    *("min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("allowed_token_ids", "bad_words", "cache_salt"),
    *("skip_special_tokens", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
    *("chat_template_kwargs", "priority", "stream", "structured_outputs"),
)
# unsupported fields -> values besides null that are accepted, since they have no effect
REFUSED: dict[str, tuple] = unsupported.COMMON | {
    **unsupported.REASONING,
    "background": (False,),
    "best_of": (1,),
    "conversation": (),
    "early_stopping": (False,),
    "echo": (False,),
    "length_penalty": (1,),
    "logprobs": (False,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "messages": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    EFFORT: (),
    "response_format": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "use_beam_search": (False,),
}
# Fields that have no effect, and that the reply repeats, as OpenAI's does.
ECHOED = ("max_tool_calls", "prompt_cache_key", "safety_identifier")
LOGPROBS = "message.output_text.logprobs"
# Accepted values of `include`. Only the first has an effect: the others are about tools and content
# that this server lacks.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
# fields of a reply's items, which clients send back without effect
ITEM_FACTS: dict[str, tuple] = {"id": (), "status": ()}
NOT_STORED = "send the conversation as input, or start the server with --response-store"
HINTS = unsupported.HINTS | {
    "use_beam_search": "use /v1/chat/completions",
    "logprobs": f'use include: ["{LOGPROBS}"]',
    EFFORT: "use reasoning.effort",
    "conversation": NOT_STORED,
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use input",
    "previous_response_id": NOT_STORED,
    "prompt": "use input",
    "response_format": "use text.format",
}


FUNCTION, HOSTED = "function", "hosted"  # kinds of tools


def _includable(name: str) -> str:
    if name not in INCLUDABLE:
        raise field_error(
            f"expected one of {', '.join(INCLUDABLE)}", "use one of these, or leave it out"
        )
    return name


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(Body):
    """Format of the text. Unlike a chat's response_format, name and schema are next to the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    strict: bool | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def response_format(self) -> dict[str, Any]:
        """Convert to a chat's response_format."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.json_schema}}


class ResponseTool(Function):
    type: Literal["function"]


class HostedTool(Body):
    """A tool that OpenAI's servers run, or a group of tools. Ignored if there are functions."""

    type: str


AnyTool = Annotated[
    Annotated[ResponseTool, Tag(FUNCTION)] | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(lambda tool: FUNCTION if kind_of(tool) == FUNCTION else HOSTED),
]


class TextSettings(Body):
    format: TextFormat | None = None


class Reasoning(Body):
    effort: Effort | None = None


class ResponsesRequest(Body):
    """The body of POST /v1/responses."""

    route: ClassVar[str] = "responses"

    input: Annotated[
        list[InputItem], ONE_ERROR, at_most(MAX_MESSAGES, "items"), BeforeValidator(_as_items)
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    text: TextSettings | None = None
    store: bool | None = None
    tools: Annotated[list[AnyTool] | None, ONE_ERROR, at_most(MAX_TOOLS, "tools")] = None
    tool_choice: Any = None  # see tool_use.py
    parallel_tool_calls: bool | None = None
    include: Annotated[
        list[Annotated[str, AfterValidator(_includable)]] | None,
        ONE_ERROR,
        at_most(len(INCLUDABLE), "names"),
    ] = None
    top_logprobs: int | None = None  # checked by the chat model
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def is_cut(self) -> bool:
        return self.truncation == "auto"

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def broken_arguments(self) -> list[str]:
        """Names of fields with arguments of an earlier call that are not a JSON object."""
        return [
            f"input.{index}.arguments"
            for index, item in enumerate(self.input)
            if isinstance(item, CallItem) and read_arguments(item.arguments) is None
        ]

    @property
    def parts(self) -> list[tuple[str, ResponsePart]]:
        """All content parts of messages and tool outputs, each with its path in the body."""
        fields = {"message": "content", "function_call_output": "output"}
        return [
            (f"input.{index}.{fields[item.type]}.{number}", part)
            for index, item in enumerate(self.input)
            if item.type in fields
            for number, part in enumerate(getattr(item, fields[item.type]))
        ]

    @property
    def functions(self) -> list[tuple[int, ResponseTool]]:
        """The tools that the client runs, each with its index in the body. Raises ApiError(400)."""
        tools = [*enumerate(self.tools or ())]
        found = [(index, tool) for index, tool in tools if isinstance(tool, ResponseTool)]
        if tools and not found:
            raise ApiError(
                400,
                "tools.0: expected a tool of type function; this server has no tools of its own.",
                "Add one, or leave tools out.",
                "tools.0",
            )
        return found

    def as_chat(self) -> ChatCompletionRequest:
        """Convert to a chat request. Raises ApiError."""
        extra = self.model_extra or {}
        messages = chat_messages(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields = {name: extra[name] for name in PASSED_ON if name in extra}
        fields |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.response_format
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        fields[EFFORT] = self.effort
        return validate(fields | self._tool_fields(), ChatCompletionRequest)

    def _tool_fields(self) -> dict[str, Any]:
        """Return the chat's fields for tools. A chat puts name and schema under `function`."""
        if not self.tools:
            is_neutral = self.tool_choice in (None, "none", "auto")
            return {} if is_neutral else {"tool_choice": _chats_choice(self.tool_choice)}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for _, tool in self.functions
        ]
        return {
            "tools": tools,
            "tool_choice": _chats_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    @property
    def ignored(self) -> list[str]:
        """Names of fields that the request sets and that have no effect."""
        table = dict.fromkeys((*REFUSED, *PASSED_ON))
        of_items = {
            name: None
            for item in self.input
            for name in unsupported.unknown(item.model_extra, ITEM_FACTS)
        }
        of_reasoning = unsupported.unknown(self.reasoning and self.reasoning.model_extra, {})
        of_text = unsupported.unknown(self.text and self.text.model_extra, {})
        return [
            *["store"] * bool(self.store),
            *(name for name in ECHOED if getattr(self, name) is not None),
            *(f"include.{name}" for name in self.include or () if name != LOGPROBS),
            *(f"reasoning.{name}" for name in of_reasoning),
            *(f"text.{name}" for name in of_text),
            *(
                f"tools.{index}"
                for index, tool in enumerate(self.tools or ())
                if isinstance(tool, HostedTool)
            ),
            *["parallel_tool_calls"] * (self.parallel_tool_calls is not None and not self.tools),
            *unsupported.unknown(self.model_extra, table),
            *(f"input.{name}" for name in of_items),
            *["input.content.detail"] * any(part.has_detail for _, part in self.parts),
        ]


def _chats_choice(choice: Any) -> Any:
    """Convert a tool_choice to the chat's form."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return _named(choice)
    if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
        names = [_named(each) if isinstance(each, dict) else each for each in choice["tools"]]
        allowed = {"mode": choice.get("mode"), "tools": names}
        return {"type": choice.get("type"), "allowed_tools": allowed}
    return choice


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


TAG_OF_TOOL = re.compile(r"^(tools\.\d+)\.(function|hosted)\b")
RENAMED = {EFFORT: "reasoning.effort", "response_format": "text.format"}
CHATS_FORMAT = re.compile(r"^response_format(\.json_schema)?")
CHATS_TOOL = re.compile(r"\btools\.(\d+)\.function\b")
NAMED_FORM = '{"type": "function", "name": ...}'


def responses_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /v1/responses. Raises ApiError and InputError."""
    request = _read(model, body)
    chat = request.as_chat()
    _check_truncation(request, chat)
    repeated = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "user": chat.user,
        "reasoning": {"effort": request.effort, "summary": None},
        "truncation": request.truncation or "disabled",
        **{name: getattr(request, name) for name in ECHOED},
    }
    if request.wants_logprobs:
        repeated["top_logprobs"] = request.top_logprobs or 0
    if request.tools:
        repeated |= {
            "tools": [tool.model_dump() for tool in request.tools],
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
        }
    if request.text is not None and request.text.format is not None:
        repeated["text"] = {
            "format": request.text.format.model_dump(by_alias=True, exclude_none=True)
        }
    with _own_names(request):
        return chat_request_job(
            model,
            chat,
            arrival,
            prefix="resp_",  # OpenAI's prefix, which clients look for
            ignored=(*chat.ignored, *request.ignored),
            broken_arguments=request.broken_arguments,
            is_cut=request.is_cut,
            renamed=RENAMED,
            repeated=repeated,
        )


def input_tokens_answer(model: ServedModel, body: bytes | bytearray) -> bytes:
    """Return the JSON reply to a body of /v1/responses/input_tokens.

    Raises ApiError and InputError.
    """
    request = _read(model, body)
    chat = request.as_chat()
    _check_truncation(request, chat)
    model.check_name(chat.model)
    with _own_names(request):
        use = tool_use(chat, model, generates=False)
        if request.is_cut:
            tokens = cut_chat_tokens(model, chat, use)
        else:
            tokens = chat_tokens(model, chat, use, checks_length=False)
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": len(tokens.ids)})


def _read(model: ServedModel, body: bytes | bytearray) -> ResponsesRequest:
    """Read and check a body. Raises ApiError; its field path has no pydantic tags."""
    try:
        request = read(body, ResponsesRequest)
    except ApiError as error:
        message, param = (
            TAG_OF_TOOL.sub(r"\1", TAG_OF_ITEM.sub(r"\1", text or ""))
            for text in (error.message, error.param)
        )
        raise ApiError.relayed(error.status, message, param or None) from None
    unsupported.refuse(request.model_extra, REFUSED, hints=HINTS)
    if request.top_logprobs and not request.wants_logprobs:
        raise ApiError(
            400,
            f'top_logprobs: requires include: ["{LOGPROBS}"].',
            "Set it, or leave top_logprobs out.",
            "top_logprobs",
        )
    if not request.input:
        raise ApiError(400, "input: expected at least one message.", "Add a message.", "input")
    limit = request.max_output_tokens
    if limit is not None and not 1 <= limit <= model.max_model_len:
        raise ApiError(
            400,
            f"max_output_tokens: expected 1 to {model.max_model_len}, found {limit}.",
            "Give such a number, or leave max_output_tokens out.",
            "max_output_tokens",
        )
    for param, part in request.parts:
        if part.media_url is not None:
            model.check_takes(param, part.kind)
    return request


def _check_truncation(request: ResponsesRequest, chat: ChatCompletionRequest) -> None:
    if request.is_cut and chat.truncate_prompt_tokens is not None:
        raise ApiError(
            400,
            'truncation: "auto" cannot be combined with truncate_prompt_tokens.',
            "Set only one.",
            "truncation",
        )


@contextmanager
def _own_names(request: ResponsesRequest) -> Iterator[None]:
    """Name fields in errors as in the body: tools.N and text.format, not the chat's names."""
    functions = request.functions

    def own(match: re.Match) -> str:
        index = int(match[1])
        return f"tools.{functions[index][0] if index < len(functions) else index}"

    try:
        yield
    except ApiError as error:
        texts = error.message.replace(CHATS_FORM, NAMED_FORM), error.param or ""
        texts = (CHATS_FORMAT.sub(RENAMED["response_format"], text) for text in texts)
        message, param = (CHATS_TOOL.sub(own, text, count=1) for text in texts)
        raise ApiError.relayed(error.status, message, param or None) from None
