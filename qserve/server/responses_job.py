"""Jobs of POST /v1/responses: each becomes a chat's job."""

import re
from dataclasses import replace

from qserve.server import unsupported
from qserve.server.errors import ApiError
from qserve.server.job import Job, chat_request_job
from qserve.server.protocol import EFFORT, read
from qserve.server.responses_protocol import (
    HINTS,
    LOGPROBS,
    REFUSED,
    REFUSED_OF_TEXT,
    ResponsesRequest,
)
from qserve.server.served_model import ServedModel
from qserve.server.tool_use import NAMED_FORM as CHATS_FORM

TAG_OF_ITEM = re.compile(r"^(input\.\d+)\.(message|function_call|function_call_output|reasoning)\b")
NAMED_FORM = '{"type": "function", "name": ...}'


def responses_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /v1/responses. Raises ApiError and InputError."""
    try:
        request = read(body, ResponsesRequest)
    except ApiError as error:
        # Without pydantic's name of the kind of item that was read.
        message, param = (
            TAG_OF_ITEM.sub(r"\1", text or "") for text in (error.message, error.param)
        )
        raise ApiError(error.status, message, param or None) from None
    unsupported.refuse(request.model_extra, REFUSED, hints=HINTS)
    if request.text is not None:
        unsupported.refuse(request.text.model_extra, REFUSED_OF_TEXT, "text.")
    if request.top_logprobs and not request.wants_logprobs:
        raise ApiError(
            400, f'top_logprobs: expected only with include: ["{LOGPROBS}"].', "top_logprobs"
        )
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
    is_cut = request.truncation == "auto"
    if is_cut and chat.truncate_prompt_tokens is not None:
        raise ApiError(
            400,
            'truncation: expected no "auto" beside truncate_prompt_tokens. Leave one of them out.',
            "truncation",
        )
    repeated = {
        "instructions": request.instructions,
        "max_output_tokens": limit,
        "metadata": request.metadata or {},
        "user": chat.user,
        "reasoning": {"effort": request.effort, "summary": None},
        "truncation": request.truncation or "disabled",
    }
    if request.wants_logprobs:
        repeated["top_logprobs"] = request.top_logprobs or 0
    if request.tools:
        repeated |= {
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools],
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
        }
    ignored = (*chat.ignored, *request.ignored)
    if request.text is not None and request.text.format is not None:
        repeated["text"] = {
            "format": request.text.format.model_dump(by_alias=True, exclude_none=True)
        }
    try:
        job = chat_request_job(
            model,
            chat,
            arrived,
            "resp",
            ignored=ignored,
            is_parsed=True,
            is_cut=is_cut,
            repeated=repeated,
        )
    except ApiError as error:
        # A chat's tool has a function.
        texts = error.message.replace(CHATS_FORM, NAMED_FORM), error.param or ""
        message, param = (text.replace(".function", "", 1) for text in texts)
        raise ApiError(error.status, message, param or None) from None
    named = ("reasoning.effort" if name == EFFORT else name for name in job.ignored)
    return replace(job, ignored=tuple(named))
