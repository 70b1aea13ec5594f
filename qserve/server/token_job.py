"""Jobs of /tokenize and /detokenize, which no engine runs: text to tokens, and back."""

from typing import Annotated, Any

from qserve.server.errors import ApiError
from qserve.server.job import Job, chat_tokens, check_vocabulary, new_job
from qserve.server.protocol import ONE_ERROR, Body, ChatCompletionRequest, parse, read
from qserve.server.served_model import ServedModel
from qserve.server.tool_use import tool_use


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt, or a chat's messages with a chat's fields."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None  # checked as those of a chat
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], ONE_ERROR]


def tokenize_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job whose only prompt are the tokens, and their names, if asked for, the echo."""
    request = read(body, TokenizeRequest)
    model.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "prompt: expected either prompt or messages.", "prompt")
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        tokens = model.tokenizer.encode(request.prompt, special)
    else:
        chat = parse(body, ChatCompletionRequest)
        tokens = chat_tokens(model, chat, tool_use(chat, model), checks_length=False)
    names = model.tokenizer.token_names(tokens) if request.return_token_strs else []
    return new_job("tok", prompts=[tokens], echoed=names, arrived=arrived)


def detokenize_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job whose only prompt are the tokens, and the text its echo."""
    request = read(body, DetokenizeRequest)
    model.check_name(request.model)
    check_vocabulary(model, request.tokens, "tokens")
    text = model.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return new_job("tok", prompts=[request.tokens], echoed=[text], arrived=arrived)
