"""Excerpts of texts, and chats rendered as text."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from calibrate.texts.evaluate import Excerpt
from calibrate.texts.image_windows import Chat
from formats.errors import InputError, one_line


def excerpts(
    documents: Sequence[Any],
    num_chars: int,
    seed: int = 0,
    render: Callable[[Any], str] = str,
    read: Callable[[Any], Chat | None] = lambda chat: None,
) -> Iterator[Excerpt | Any]:
    """Yield excerpts of about `num_chars` characters, one of each text in turn, until all are used.

    The seed decides the order of a text's excerpts. A chat is one excerpt, rendered by `render`. If
    `read` returns a Chat for it (a chat with images), that is yielded instead.
    """
    order = random.Random(seed)
    queues = [pieces(each, num_chars) if isinstance(each, str) else [each] for each in documents]
    for queue in queues:
        order.shuffle(queue)
    while queues:
        for queue in queues:
            piece = queue.pop()
            if isinstance(piece, Excerpt):
                yield piece
            else:
                yield read(piece) or Excerpt(text=render(piece), begins=True)
        queues = [queue for queue in queues if queue]


def pieces(text: str, num_chars: int) -> list[Excerpt]:
    """Cut a text into excerpts, at the end of a line or a word where possible."""
    found, begin = [], 0
    while len(text) - begin > 1.5 * num_chars:
        end = begin + num_chars
        for separator in ("\n", " "):
            place = text.rfind(separator, begin + num_chars // 2, end)
            if place >= 0:
                end = place + 1
                break
        found.append(Excerpt(text=text[begin:end], begins=begin == 0))
        begin = end
    return [*found, Excerpt(text=text[begin:], begins=begin == 0)]


def render(document: Any, tokenizer: Any) -> str:
    """Render a text, or a chat with the model's template. Raises InputError."""
    if isinstance(document, str):
        return document
    if not tokenizer.chat_template:
        raise InputError(
            "calibration data",
            "has chat messages, but the model has no chat template",
            'use "text"',
        )
    try:
        messages = list(map(_for_template, document))
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # a template raises exceptions of any kind
        raise InputError(
            "calibration data",
            f"the chat template rejects it: {one_line(error)}",
            'fix these "messages", or give rendered chats as "text"',
        ) from None
    # The template writes BOS itself; every text gets exactly one.
    bos = tokenizer.bos_token or ""
    return text.removeprefix(bos) if bos else text


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message to what chat templates read, as the server does.

    Text parts become one text. Arguments of tool calls become objects.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    found = dict(message)
    if isinstance(content, list) and all(map(_is_text_part, content)):
        found["content"] = "\n".join(part["text"] for part in content)
    elif content is None and calls:
        found["content"] = ""
    if isinstance(calls, list):
        found["tool_calls"] = list(map(_with_parsed_arguments, calls))
    return found


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call
    return call | {"function": function | {"arguments": parsed}}
