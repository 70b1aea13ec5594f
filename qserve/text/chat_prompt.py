"""ChatPrompt: a rendered conversation whose messages cannot create control tokens.

Control tokens, such as <|im_end|>, separate the messages of different roles. The chat template
writes a control token as text, and a message may contain the same text. So ChatPrompt replaces such
texts in messages by marks before it runs the template, and later encodes the marked texts as plain
text. Text without marks is encoded as in transformers.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from formats.errors import InputError

# Private-use characters of Unicode, which have no meaning for any tokenizer.
BLANK, MARK_START, MARK_END = "\ue000", "\ue001", "\ue002"
MARK = re.compile(f"{MARK_START}[0-9.]+{MARK_END}")
# Keys in messages, parts and calls whose values the template may compare or check.
NOT_TEXT = ("role", "type")  # the values are fixed words
IDS = ("id", "tool_call_id")  # the values are any text, but equal ids must stay equal
ARGUMENTS = "arguments"  # key of a call's arguments, where all values are text

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]


class Encoder(Protocol):
    """The attributes of Tokenizer that ChatPrompt uses."""

    control_pattern: re.Pattern | None
    control_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The rendered text of a conversation. Create it with `ChatPrompt.render`."""

    text: str  # in texts of messages, control tokens are replaced by marks
    marks: dict[str, str]  # mark -> original text

    @classmethod
    def render(
        cls,
        encoder: Encoder,
        render: Render,
        messages: Messages,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> "ChatPrompt":
        """Run the template. Raises InputError if messages change the template's control tokens."""
        pattern = encoder.control_pattern
        if pattern is None:
            return cls(text=render(messages), marks={})
        for name, value in (template_kwargs or {}).items():
            if isinstance(value, str) and pattern.search(value):
                raise InputError(
                    f"chat_template_kwargs.{name}",
                    "contains the text of a control token",
                    "change the text",
                )
        _check_plain(tools, pattern, "tools")
        for message in messages:
            for call in message.get("tool_calls", ()):
                # Keys of arguments must not contain control tokens: a template may look them up.
                _check_plain(_keys(call), pattern, "messages.tool_calls")
        nonce, names = secrets.randbelow(10**18), {}

        def mark(found: re.Match) -> str:
            return names.setdefault(found[0], f"{MARK_START}{nonce}.{len(names)}{MARK_END}")

        def marked(each: str) -> str:
            return pattern.sub(mark, each)

        text = render(_map_texts(messages, marked, marked))
        # A template may cut or join texts so that they form a control token. To detect this, render
        # again with blank texts, and compare the control tokens.
        blank = render(
            _map_texts(
                messages,
                lambda each: BLANK if each.strip() else each,
                lambda each: pattern.sub(BLANK, each),
            )
        )
        marks = {name: control for control, name in names.items()}
        if pattern.findall(text) != pattern.findall(blank):
            raise InputError(
                "messages",
                "their text would become control tokens in the model's chat template",
                "change the text, or start the server with --chat-special-tokens if you trust it",
            )
        return cls(text=text, marks=marks)

    def encode(self, encoder: Encoder) -> list[int]:
        """Return token ids, with control tokens only where the template wrote them."""
        if encoder.control_pattern is None:
            return encoder.encode(self.text, False)
        pieces = encoder.control_pattern.split(self.text)  # alternately texts and control tokens
        if not self.marks:
            ids = encoder.encode(self.text, False)
            num_controls = sum(token in encoder.control_ids for token in ids)
            if num_controls <= len(pieces) // 2:
                return ids
            # The tokenizer's normalizer turned other characters into control tokens.
            return self._encode_pieces(encoder, pieces, lambda piece: True)
        return self._encode_pieces(encoder, pieces, lambda piece: MARK_START in piece)

    def _encode_pieces(
        self, encoder: Encoder, pieces: list[str], is_plain: Callable[[str], bool]
    ) -> list[int]:
        ids: list[int] = []
        run = ""  # text between two plain pieces, encoded as in transformers
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
    """Return a pattern for the texts of control tokens, longest first; None for no texts."""
    escaped = [re.escape(text) for text in sorted(texts, key=len, reverse=True) if text]
    return re.compile(f"({'|'.join(escaped)})") if escaped else None


def _map_texts(
    value: Any,
    change: Callable[[str], str],
    change_id: Callable[[str], str],
    *,
    is_free: bool = False,
) -> Any:
    """Copy messages, and apply `change` to texts of users, `change_id` to ids.

    `is_free`: the value is within a call's arguments, where keys have no special meaning.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(each, change, change_id, is_free=is_free) for each in value]
    if not isinstance(value, dict):
        return value
    copy = {}
    for key, each in value.items():
        if is_free or key not in (*NOT_TEXT, *IDS) or not isinstance(each, str):
            inner_is_free = is_free or key == ARGUMENTS
            copy[key] = _map_texts(each, change, change_id, is_free=inner_is_free)
        else:
            copy[key] = change_id(each) if key in IDS else each
    return copy


def _keys(value: Any) -> list[str]:
    """Return the keys of all objects within a JSON value."""
    if isinstance(value, list):
        return [key for each in value for key in _keys(each)]
    if isinstance(value, dict):
        return [*value, *(key for each in value.values() for key in _keys(each))]
    return []


def _check_plain(value: Any, pattern: re.Pattern, name: str) -> None:
    """Raise InputError if a text or key in a JSON value contains a control token's text."""
    if isinstance(value, str):
        if pattern.search(value):
            raise InputError(name, "contain the text of a control token", "change the text")
    elif isinstance(value, list):
        for each in value:
            _check_plain(each, pattern, name)
    elif isinstance(value, dict):
        _check_plain([*value, *value.values()], pattern, name)
