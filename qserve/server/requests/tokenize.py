"""Replies of /tokenize and /detokenize, which do not need the engine.

A reply may have megabytes, so its JSON is encoded in the process that tokenizes the text.
"""

from typing import Annotated, Any

import msgspec

from qserve.server.http.errors import ApiError
from qserve.server.requests.chat import chat_tokens
from qserve.server.requests.job import check_vocabulary
from qserve.server.requests.protocol import ONE_ERROR, Body, ChatCompletionRequest, parse, read
from qserve.server.requests.served_model import ServedModel
from qserve.server.requests.tool_use import tool_use

MAX_TOKENS = 2**20  # per reply: about 20 MB with token_strs


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt, or messages and other fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None  # validated by ChatCompletionRequest
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], ONE_ERROR]


def tokenize_answer(model: ServedModel, body: bytes | bytearray) -> bytes:
    """Return JSON with token ids and, if requested, token_strs. Raises ApiError and InputError."""
    request = read(body, TokenizeRequest)
    model.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(
            400, "prompt: expected either prompt or messages.", "Send one of the two.", "prompt"
        )
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        tokens = model.tokenizer.encode(request.prompt, special)
    else:
        chat = parse(body, ChatCompletionRequest)
        use = tool_use(chat, model, generates=False)
        tokens = chat_tokens(model, chat, use, checks_length=False).ids
    _check_count(len(tokens), "prompt" if request.messages is None else "messages")
    names = model.tokenizer.token_names(tokens) if request.return_token_strs else None
    reply = {
        "count": len(tokens),
        "max_model_len": model.max_model_len,
        "tokens": tokens,
        "token_strs": names,
    }
    return msgspec.json.encode(reply)


def detokenize_answer(model: ServedModel, body: bytes | bytearray) -> bytes:
    """Return JSON with the text. Raises ApiError and InputError."""
    request = read(body, DetokenizeRequest)
    model.check_name(request.model)
    _check_count(len(request.tokens), "tokens")
    check_vocabulary(model, request.tokens, "tokens")
    text = model.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return msgspec.json.encode({"prompt": text})


def _check_count(count: int, field: str) -> None:
    if count > MAX_TOKENS:
        raise ApiError(
            400,
            f"{field}: expected at most {MAX_TOKENS} tokens in one response, found {count}.",
            "Split the input.",
            field,
        )
