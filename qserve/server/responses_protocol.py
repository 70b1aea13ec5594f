"""The body of POST /v1/responses, and the chat that it means. Nothing is stored.

Knows no tokens.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from qserve.server import unsupported
from qserve.server.content_parts import InputPart, refusal_fits
from qserve.server.protocol import (
    EFFORT,
    MAX_MESSAGES,
    MAX_PARTS,
    ONE_ERROR,
    Body,
    ChatCompletionRequest,
    Effort,
    at_most,
    check_role,
    validate,
)
from qserve.server.tool_fields import MAX_TOOLS, Function

# Of a chat's fields those that OpenAI's Responses have not; they mean the same here.
PASSED_ON = (
    *("model", "request_id", "user", "service_tier", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed"),
    *("min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("allowed_token_ids", "bad_words", "cache_salt"),
    *("skip_special_tokens", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
    *("chat_template_kwargs", "priority", "stream", "structured_outputs"),
)
# field: the values that change nothing, besides null
REFUSED: dict[str, tuple] = unsupported.COMMON | {
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
REFUSED_OF_TEXT: dict[str, tuple] = {"verbosity": ("medium",)}
LOGPROBS = "message.output_text.logprobs"
# What may be asked for beside the answer. All but the first are of tools, parts and stores that
# this server has not: there is nothing to include.
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
# of an earlier answer's items, which clients send again
ITEM_FACTS: dict[str, tuple] = {"id": (), "status": ()}
HINTS = unsupported.HINTS | {
    "use_beam_search": "use /v1/chat/completions",
    "logprobs": f'use include: ["{LOGPROBS}"]',
    EFFORT: "use reasoning.effort",
    "conversation": "nothing is stored here: send the conversation as input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use input",
    "previous_response_id": "nothing is stored here: send the conversation as input",
    "prompt": "use input",
    "response_format": "use text.format",
}


def _includable(name: str) -> str:
    if name not in INCLUDABLE:
        raise PydanticCustomError("include", f"expected one of {', '.join(INCLUDABLE)}")
    return name


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[InputPart], ONE_ERROR, at_most(MAX_PARTS, "parts"), BeforeValidator(_as_parts)
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Annotated[str, AfterValidator(check_role)]
    name: str | None = None  # a chat checks it
    content: Parts

    @model_validator(mode="after")
    def _check_refusal(self) -> "InputMessage":
        refusal_fits(self.role, self.content)
        return self


class CallItem(Body):
    """A call that an earlier answer made; a chat checks its fields."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutput(Body):
    """What a called tool said."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts

    @model_validator(mode="after")
    def _check_refusal(self) -> "CallOutput":
        refusal_fits("tool", self.output)
        return self


class ReasoningItem(Body):
    """Reasoning of an earlier answer, which is not said again."""

    type: Literal["reasoning"]


def _kind_of(item: Any) -> str:
    """Which of the items; a message may leave its type out."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else ""


def _stated(item: Any) -> Any:
    if isinstance(item, dict) and item.get("type") == "item_reference":
        raise PydanticCustomError(
            "item",
            "expected the item itself, found a reference: nothing is stored here. Clients that"
            " send references send items with store: false",
        )
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind_of,
        custom_error_type="item",
        custom_error_message=(
            "expected an item of type message, function_call, function_call_output or reasoning"
        ),
    ),
    BeforeValidator(_stated),
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


def _function(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "function":
        raise PydanticCustomError(
            "tool", "expected a tool of type function; this server has no tools of its own"
        )
    return value


class ResponseTool(Function):
    type: Literal["function"]


AnyTool = Annotated[ResponseTool, BeforeValidator(_function)]


class TextSettings(Body):
    format: TextFormat | None = None


class Reasoning(Body):
    effort: Effort | None = None


class ResponsesRequest(Body):
    """The body of POST /v1/responses; PASSED_ON names the fields that a chat checks."""

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
    tool_choice: Any = None  # tool_use.py reads it
    parallel_tool_calls: bool | None = None
    include: Annotated[
        list[Annotated[str, AfterValidator(_includable)]] | None,
        ONE_ERROR,
        at_most(len(INCLUDABLE), "names"),
    ] = None
    top_logprobs: int | None = None  # a chat checks it
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    def as_chat(self) -> ChatCompletionRequest:
        """The same as a chat. Raises ApiError."""
        extra = self.model_extra or {}
        messages = _messages(self.input)
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
        """OpenAI writes a tool's name and schema beside its type here."""
        if not self.tools:
            is_neutral = self.tool_choice in (None, "none", "auto")
            return {} if is_neutral else {"tool_choice": _chats_choice(self.tool_choice)}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]
        return {
            "tools": tools,
            "tool_choice": _chats_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    @property
    def ignored(self) -> list[str]:
        """The fields that are set and change nothing, by name."""
        table = dict.fromkeys((*REFUSED, *PASSED_ON))
        of_items = {
            name: None
            for item in self.input
            for name in unsupported.unknown(item.model_extra, ITEM_FACTS)
        }
        of_reasoning = unsupported.unknown(self.reasoning and self.reasoning.model_extra, {})
        return [
            *["store"] * bool(self.store),
            *(f"include.{name}" for name in self.include or () if name != LOGPROBS),
            *(f"reasoning.{name}" for name in of_reasoning),
            *["parallel_tool_calls"] * (self.parallel_tool_calls is not None and not self.tools),
            *unsupported.unknown(self.model_extra, table),
            *(f"input.{name}" for name in of_items),
        ]


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """The items as a chat's messages; calls belong to the assistant's message before them."""
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
        content = [{"type": "text", "text": part.text} for part in parts]
        whose = {"role": "tool", "tool_call_id": item.call_id} if is_output else {}
        named = {} if is_output else {"role": item.role, "name": item.name}
        messages.append({**whose, **named, "content": content})
    return messages


def _chats_choice(choice: Any) -> Any:
    """The same choice of tools as a chat writes it."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return _named(choice)
    if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
        names = [_named(each) if isinstance(each, dict) else each for each in choice["tools"]]
        allowed = {"mode": choice.get("mode"), "tools": names}
        return {"type": choice.get("type"), "allowed_tools": allowed}
    return choice


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
