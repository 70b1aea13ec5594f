"""ChatPrompt: a rendered conversation in which the texts of messages cannot make control tokens.

A control token, such as <|im_end|>, tells the model who speaks. The chat template writes it as
text, and a message may hold the same text. So each such text in a message is replaced by a mark
before the template runs, and is encoded afterwards as the plain text that it is. What has none is
encoded as transformers would. Knows no HTTP and no files.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from formats.errors import InputError

# Of private use: no tokenizer gives these characters a meaning.
BLANK, MARK_START, MARK_END = "\ue000", "\ue001", "\ue002"
MARK = re.compile(f"{MARK_START}[0-9.]+{MARK_END}")
# Keys of a message, of its parts and calls whose values the template compares or checks; these are
# names and ids in which no control token fits.
NOT_TEXT = ("role", "type", "id", "tool_call_id")
ARGUMENTS = "arguments"  # of a call: all its values are text

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]


class Encoder(Protocol):
    """The part of a Tokenizer that is used here."""

    control_pattern: re.Pattern | None
    control_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The template's text. Made by `ChatPrompt.render`."""

    text: str  # with marks in place of control tokens' texts in messages
    marks: dict[str, str]  # mark: the text that it stands for

    @classmethod
    def render(
        cls,
        encoder: Encoder,
        render: Render,
        messages: Messages,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> "ChatPrompt":
        """Run the template. Raises InputError where messages change its control tokens."""
        pattern = encoder.control_pattern
        if pattern is None:
            return cls(text=render(messages), marks={})
        for name, value in (template_kwargs or {}).items():
            if isinstance(value, str) and pattern.search(value):
                raise InputError(
                    f"chat_template_kwargs.{name}", "holds the text of a control token"
                )
        _check_plain(tools, pattern, "tools")
        for message in messages:
            for call in message.get("tool_calls", ()):
                # Of arguments the values alone may hold them: a template may look for keys.
                _check_plain(_keys(call), pattern, "messages.tool_calls")
        nonce, marks = secrets.randbelow(10**18), {}

        def mark(found: re.Match) -> str:
            name = f"{MARK_START}{nonce}.{len(marks)}{MARK_END}"
            marks[name] = found[0]
            return name

        text = render(_map_texts(messages, lambda each: pattern.sub(mark, each)))
        # A template may cut or join texts so that a control token comes of them. It then writes
        # others than for texts that have nothing in them.
        blank = render(_map_texts(messages, lambda each: BLANK if each.strip() else each))
        if pattern.findall(text) != pattern.findall(blank):
            raise InputError(
                "messages",
                "the model's chat template would make control tokens of their text",
                "change the text, or start the server with --chat-special-tokens if you trust it",
            )
        return cls(text=text, marks=marks)

    def encode(self, encoder: Encoder) -> list[int]:
        """Token ids: the template's control tokens are such, all else is text."""
        if encoder.control_pattern is None:
            return encoder.encode(self.text, False)
        pieces = encoder.control_pattern.split(self.text)  # texts and control tokens in turns
        if not self.marks:
            ids = encoder.encode(self.text, False)
            num_controls = sum(token in encoder.control_ids for token in ids)
            if num_controls <= len(pieces) // 2:
                return ids
            # The tokenizer's normalizer made control tokens of other characters.
            return self._encode_pieces(encoder, pieces, lambda piece: True)
        return self._encode_pieces(encoder, pieces, lambda piece: MARK_START in piece)

    def _encode_pieces(
        self, encoder: Encoder, pieces: list[str], is_plain: Callable[[str], bool]
    ) -> list[int]:
        ids: list[int] = []
        run = ""  # what is encoded as transformers would, from one plain piece to the next
        for index, piece in enumerate(pieces):
            if index % 2 or not is_plain(piece):
                run += piece
                continue
            ids += encoder.encode(run, False)
            run = ""
            plain = MARK.sub(lambda found: self.marks.get(found[0], found[0]), piece)
            ids += encoder.encode_plain(plain)
        return ids + encoder.encode(run, False)


def control_pattern(texts: set[str]) -> re.Pattern | None:
    """Matches the control tokens' texts, the longest first; None without any."""
    escaped = [re.escape(text) for text in sorted(texts, key=len, reverse=True) if text]
    return re.compile(f"({'|'.join(escaped)})") if escaped else None


def _map_texts(value: Any, change: Callable[[str], str], *, is_free: bool = False) -> Any:
    """A copy of messages in which every text that somebody wrote is changed.

    `is_free`: keys mean nothing, as in the arguments of a call.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(each, change, is_free=is_free) for each in value]
    if isinstance(value, dict):
        return {
            key: each
            if key in NOT_TEXT and not is_free
            else _map_texts(each, change, is_free=is_free or key == ARGUMENTS)
            for key, each in value.items()
        }
    return value


def _keys(value: Any) -> list[str]:
    """The keys of all objects within a value."""
    if isinstance(value, list):
        return [key for each in value for key in _keys(each)]
    if isinstance(value, dict):
        return [*value, *(key for each in value.values() for key in _keys(each))]
    return []


def _check_plain(value: Any, pattern: re.Pattern, name: str) -> None:
    """Raise InputError if a text or key within the value is, or holds, a control token's text."""
    if isinstance(value, str):
        if pattern.search(value):
            raise InputError(name, "hold the text of a control token", "change the text")
    elif isinstance(value, list):
        for each in value:
            _check_plain(each, pattern, name)
    elif isinstance(value, dict):
        _check_plain([*value, *value.values()], pattern, name)
