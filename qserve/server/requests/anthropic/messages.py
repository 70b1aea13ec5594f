"""Converts bodies of POST /v1/messages and /v1/messages/count_tokens to chat requests and jobs."""

import re
from typing import Any

import msgspec

from formats.errors import InputError
from qserve.server.http.errors import ApiError, as_api_error
from qserve.server.requests.anthropic.blocks import (
    ASSISTANT,
    IMAGE,
    SYSTEM,
    TAGS,
    TOOL_RESULT,
    TOOL_USE,
)
from qserve.server.requests.anthropic.conversation import chat_messages
from qserve.server.requests.anthropic.fields import (
    OMITTED,
    CountTokensRequest,
    MessagesRequest,
)
from qserve.server.requests.anthropic.tools import (
    MessagesTool,
    callable_tools,
    chat_tool_fields,
)
from qserve.server.requests.chat import KWARGS, SWITCHES, chat_request_job, chat_tokens
from qserve.server.requests.generation_job import PromptTooLong
from qserve.server.requests.job import Arrival, Job
from qserve.server.requests.protocol import EFFORT, ChatCompletionRequest, read, validate
from qserve.server.requests.served_model import ServedModel
from qserve.server.requests.tool_use import tool_use
from qserve.server.requests.unsupported import unknown

# Chat fields that Anthropic's API lacks. Here they are accepted with the same meaning.
PASSED_ON = (
    *("request_id", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words"),
    *("allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("cache_salt", "priority", "structured_outputs", KWARGS),
)
# Fields that have no effect here, and are not reported as ignored, since every client sends them.
# The prefix cache is automatic, and there are no service tiers.
SILENT = ("cache_control", "metadata", "service_tier", "inference_geo", "context_management")
# Chat field -> name of the field in a body of this API.
RENAMED = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    EFFORT: "output_config.effort",
}
OF_TOOLS = re.compile(r"\btools\.(\d+)\.function(\.parameters)?")


def messages_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /v1/messages. Raises ApiError."""
    request = _read(body, MessagesRequest)
    model.check_name(request.model)
    asked = request.max_tokens
    if asked < 0:
        raise ApiError(
            400, f"max_tokens: expected 0 or more, found {asked}.", "Raise it.", "max_tokens"
        )
    tools = callable_tools(request.tools)
    extra = request.model_extra or {}
    fields = {name: extra[name] for name in PASSED_ON if name in extra}
    fields |= {
        # Clients request the maximum of large models, so cap it by the context length.
        # To compute a prompt the engine needs one token; the reply to max_tokens: 0 drops it.
        "max_tokens": min(max(asked, 1), model.max_model_len),
        "stop": request.stop_sequences or None,
        **{name: getattr(request, name) for name in ("stream", "temperature", "top_p", "top_k")},
    }
    display = None if request.thinking is None else request.thinking.display
    with _Renamed([index for index, _ in tools]):
        chat = _chat(model, request, [tool for _, tool in tools], fields)
        return chat_request_job(
            model,
            chat,
            arrival,
            prefix="msg_",
            ignored=[*chat.ignored, *_ignored(request, model)],
            broken_arguments=(),
            renamed=RENAMED,
            repeated={"max_tokens": asked, "omits_thinking": display == OMITTED},
        )


def count_tokens_answer(model: ServedModel, body: bytes | bytearray) -> bytes:
    """Return the JSON reply with the number of prompt tokens. Raises ApiError."""
    request = _read(body, CountTokensRequest)
    model.check_name(request.model)
    tools = callable_tools(request.tools)
    with _Renamed([index for index, _ in tools]):
        chat = _chat(model, request, [tool for _, tool in tools], {})
        use = tool_use(chat, model, generates=False)
        tokens = chat_tokens(model, chat, use, checks_length=False)
    return msgspec.json.encode({"input_tokens": len(tokens.ids)})


def _read(body: bytes | bytearray, kind: type[CountTokensRequest]) -> Any:
    """Read a body. Raises ApiError(400); its field path has no pydantic tags."""
    try:
        request = read(body, kind)
    except ApiError as error:
        param = None if error.param is None else _without_tags(error.param)
        message = error.message
        if param is not None:
            message = message.replace(error.param, param, 1)
        raise ApiError.relayed(error.status, message, param) from None
    if not request.messages:
        raise ApiError(
            400, "messages: expected at least one message.", "Add a message.", "messages"
        )
    last = request.messages[-1]
    calls = [block.id for block in last.content if block.type == TOOL_USE]
    if calls:
        param = f"messages.{len(request.messages) - 1}"
        raise ApiError(
            400,
            f"{param}: `tool_use` ids were found without `tool_result` blocks immediately after:"
            f" {', '.join(calls):.300}.",
            "Add a tool_result for each to the next message.",
            param,
        )
    return request


def _without_tags(param: str) -> str:
    """Remove the block type after a block's index: content.0.text.text -> content.0.text."""
    parts = param.split(".")
    return ".".join(
        part
        for before, part in zip(["", *parts], parts, strict=False)
        if not (before.isdecimal() and part in TAGS)
    ).replace("schema_", "schema")


def _chat(
    model: ServedModel,
    request: CountTokensRequest,
    tools: list[MessagesTool],
    fields: dict[str, Any],
) -> ChatCompletionRequest:
    """Convert a conversation to a chat request. Raises ApiError."""
    turns = [(turn.role, turn.content) for turn in request.messages]
    for index, (_, blocks) in enumerate(turns):
        for number, block in enumerate(blocks):
            param = f"messages.{index}.content.{number}"
            if block.type == IMAGE:
                model.check_takes(param)
            if block.type == TOOL_RESULT:
                for place, each in enumerate(block.content or ()):
                    if each.type == IMAGE:
                        model.check_takes(f"{param}.content.{place}")
    has_later_system = any(role == SYSTEM for role, _ in turns[1:])
    messages = chat_messages(
        request.system or (),
        turns,
        keeps_later_system=has_later_system and model.tokenizer.renders_later_system,
    )
    last = messages[-1] if messages else {}
    if last.get("role") == ASSISTANT:
        if last["content"]:  # the model continues this message
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            messages.pop()
    fields |= {"model": request.model, "messages": messages, EFFORT: request.effort}
    fields |= chat_tool_fields(tools, request.tool_choice)
    if request.format is not None:
        named = {"name": "answer", "schema": request.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    if request.thinking is not None:
        switches = dict.fromkeys(_switches(model), request.thinking.type != "disabled")
        fields[KWARGS] = switches | (fields.get(KWARGS) or {})
    return validate(fields, ChatCompletionRequest)


def _switches(model: ServedModel) -> list[str]:
    """Return the chat template's variables that turn thinking on and off."""
    known = model.tokenizer.template_settings
    return [name for name in SWITCHES if name in known]


def _ignored(request: MessagesRequest, model: ServedModel) -> list[str]:
    """Return the names of fields that are set and have no effect."""
    table = dict.fromkeys((*PASSED_ON, *SILENT))
    found = unknown(request.model_extra, table)
    if request.thinking is not None:
        if request.thinking.type == "disabled" and not _switches(model):
            found.append("thinking")
        found += ["thinking.budget_tokens"] * (request.thinking.budget_tokens is not None)
    for index, tool in enumerate(request.tools or ()):
        found += [f"tools.{index}"] * tool.runs_on_server
    return found


class _Renamed:
    """Context manager that rewrites errors on chat fields: names and wording of this API."""

    def __init__(self, tools: list[int]) -> None:
        """`tools`: for each tool of the chat request, its index in the body."""
        self._tools = tools

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PromptTooLong):
            # If clients find this wording, they shorten the conversation.
            raise ApiError.relayed(
                400, f"prompt is too long: {error.length} tokens > {error.limit} maximum"
            ) from None
        if isinstance(error, ApiError | InputError):
            found = as_api_error(error)
            param = found.param
            message = found.message.replace('"required"', '"any"')
            if param is not None:
                first, dot, rest = param.partition(".")
                renamed = RENAMED.get(first, first) + dot + rest
                if message.startswith(param):
                    message = renamed + message[len(param) :]
                param = self._of_tools(renamed)
            raise ApiError.relayed(found.status, self._of_tools(message), param) from None

    def _of_tools(self, text: str) -> str:
        def named(found: re.Match) -> str:
            index = int(found[1])
            place = self._tools[index] if index < len(self._tools) else index
            return f"tools.{place}" + (".input_schema" if found[2] else "")

        return OF_TOOLS.sub(named, text)
