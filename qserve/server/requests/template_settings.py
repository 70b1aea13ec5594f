"""Chat template settings in a request: `chat_template_kwargs` and the reasoning effort.

Names that the template does not read are ignored: clients send the same ones to every model.
"""

from typing import Any

from qserve.server.http.errors import ApiError
from qserve.server.requests.protocol import EFFORT, ChatCompletionRequest
from qserve.text.tokenizer import Tokenizer

# Templates without an effort may still turn thinking on and off. As in vLLM, any effort but
# "none" turns it on.
SWITCHES = ("enable_thinking", "thinking")
NO_EFFORT = "none"
KWARGS = "chat_template_kwargs"


def settings(request: ChatCompletionRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Variables for the template. Raises ApiError for two different efforts."""
    given = _read(request, tokenizer)
    effort = request.reasoning_effort
    if effort is not None and given.get(EFFORT, effort) != effort:
        raise ApiError(
            400,
            f"{EFFORT}: expected the same value as {KWARGS}.{EFFORT}, or only one of the"
            f" two, found {effort!r}.",
            EFFORT,
        )
    return _of_effort(effort, tokenizer) | given


def ignored(request: ChatCompletionRequest, tokenizer: Tokenizer) -> list[str]:
    """Names of fields that are set and that the template does not read."""
    given, effort = _read(request, tokenizer), request.reasoning_effort
    asked = request.chat_template_kwargs or {}
    names = [f"{KWARGS}.{name}" for name in asked if name not in given]
    is_read = EFFORT in given or _of_effort(effort, tokenizer).keys() - given
    return names + [EFFORT] * (effort is not None and not is_read)


def _read(request: ChatCompletionRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Settings in `chat_template_kwargs` that the template reads.

    Raises ApiError for the server's own names, and for values a template could loop over.
    """
    given = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        param = f"{KWARGS}.{name}"
        if name in tokenizer.reserved_settings:
            raise ApiError(400, f"{param:.300}: is set by the server. Leave it out.", param[:300])
        if name not in tokenizer.template_settings:
            continue
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ApiError(400, f"{param}: expected a boolean, a number or a string.", param)
        given[name] = value
    return given


def _of_effort(effort: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Template variables that express a reasoning effort."""
    if effort is None:
        return {}
    meanings = {EFFORT: effort} | dict.fromkeys(SWITCHES, effort != NO_EFFORT)
    return {name: meanings[name] for name in meanings if name in tokenizer.template_settings}
