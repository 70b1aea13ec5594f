"""What a chat's body tells the template beside its messages: `chat_template_kwargs` and how hard to
think. Knows no tokens."""

from typing import Any

from qserve.server.errors import ApiError
from qserve.server.protocol import EFFORT, ChatCompletionRequest
from qserve.text import Tokenizer

# Templates that know of no effort may still turn thinking on and off. As in vLLM, any effort but
# "none" turns it on.
SWITCHES = ("enable_thinking", "thinking")
NO_EFFORT = "none"
# Clients send these to any model, also to one that has nothing to switch.
MAY_BE_UNREAD = (EFFORT, *SWITCHES)


def settings(request: ChatCompletionRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the template gets by name. Raises ApiError for two efforts that differ."""
    given = _read(request, tokenizer)
    effort = request.reasoning_effort
    if effort is not None and given.get(EFFORT, effort) != effort:
        raise ApiError(
            400,
            f"{EFFORT}: expected the value of chat_template_kwargs.{EFFORT}, or only one of the"
            f" two, found {effort!r}.",
            EFFORT,
        )
    return _of_effort(effort, tokenizer) | given


def ignored(request: ChatCompletionRequest, tokenizer: Tokenizer) -> list[str]:
    """The fields that are set and that the template does not read, by name."""
    given, effort = _read(request, tokenizer), request.reasoning_effort
    asked = request.chat_template_kwargs or {}
    names = [f"chat_template_kwargs.{name}" for name in asked if name not in given]
    is_read = EFFORT in given or _of_effort(effort, tokenizer).keys() - given
    return names + [EFFORT] * (effort is not None and not is_read)


def _read(request: ChatCompletionRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """`chat_template_kwargs` without what may go unread and does; other names are an error."""
    return {
        name: value
        for name, value in (request.chat_template_kwargs or {}).items()
        if name not in MAY_BE_UNREAD or name in tokenizer.template_settings
    }


def _of_effort(effort: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """What an effort is to the names that the template reads."""
    if effort is None:
        return {}
    meanings = {EFFORT: effort} | dict.fromkeys(SWITCHES, effort != NO_EFFORT)
    return {name: meanings[name] for name in meanings if name in tokenizer.template_settings}
