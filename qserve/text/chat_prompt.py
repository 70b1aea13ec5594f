"""ChatPrompt: a rendered conversation in which texts of messages cannot create control tokens.

A control token, such as <|im_end|>, tells the model who speaks. The chat template writes it as
text, and a message may contain the same text. Each such text in a message is therefore replaced by
a mark before the template runs, and encoded as plain text afterwards. Text without marks is encoded
as in transformers.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from formats.errors import InputError

# Private-use characters, which have no meaning for any tokenizer.
BLANK, MARK_START, MARK_END = "\ue000", "\ue001", "\ue002"
MARK = re.compile(f"{MARK_START}[0-9.]+{MARK_END}")
# Keys of a message, its parts and its calls whose values the template may compare or check.
NOT_TEXT = ("role", "type")  # one of a few values
IDS = ("id", "tool_call_id")  # any text, but equal ids must stay equal
ARGUMENTS = "arguments"  # of a call: all its values are text

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]


class Encoder(Protocol):
    """Methods of Tokenizer that are used here."""

    control_pattern: re.Pattern | None
    control_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Text of the template, created by `ChatPrompt.render`."""

    text: str  # marks replace the texts of control tokens in messages
    marks: dict[str, str]  # mark -> the text it stands for

    @classmethod
    def render(
        cls,
        encoder: Encoder,
        render: Render,
        messages: Messages,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> "ChatPrompt":
        """Run the template. Raises InputError if messages change its control tokens."""
        pattern = encoder.control_pattern
        if pattern is None:
            return cls(text=render(messages), marks={})
        for name, value in (template_kwargs or {}).items():
            if isinstance(value, str) and pattern.search(value):
                raise InputError(
                    f"chat_template_kwargs.{name}", "contains the text of a control token"
                )
        _check_plain(tools, pattern, "tools")
        for message in messages:
            for call in message.get("tool_calls", ()):
                # In arguments only the values may contain them: a template may look for keys.
                _check_plain(_keys(call), pattern, "messages.tool_calls")
        nonce, names = secrets.randbelow(10**18), {}

        def mark(found: re.Match) -> str:
            return names.setdefault(found[0], f"{MARK_START}{nonce}.{len(names)}{MARK_END}")

        def marked(each: str) -> str:
            return pattern.sub(mark, each)

        text = render(_map_texts(messages, marked, marked))
        # A template may cut or join texts so that they form a control token. Its control tokens
        # then differ from those for texts without any.
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
        """Token ids: the template's control tokens stay control tokens, all else is text."""
        if encoder.control_pattern is None:
            return encoder.encode(self.text, False)
        pieces = encoder.control_pattern.split(self.text)  # texts and control tokens alternate
        if not self.marks:
            ids = encoder.encode(self.text, False)
            num_controls = sum(token in encoder.control_ids for token in ids)
            if num_controls <= len(pieces) // 2:
                return ids
            # The tokenizer's normalizer made control tokens out of other characters.
            return self._encode_pieces(encoder, pieces, lambda piece: True)
        return self._encode_pieces(encoder, pieces, lambda piece: MARK_START in piece)

    def _encode_pieces(
        self, encoder: Encoder, pieces: list[str], is_plain: Callable[[str], bool]
    ) -> list[int]:
        ids: list[int] = []
        run = ""  # encoded as in transformers, between two plain pieces
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
    """Pattern of the control tokens' texts, longest first; None if there are none."""
    escaped = [re.escape(text) for text in sorted(texts, key=len, reverse=True) if text]
    return re.compile(f"({'|'.join(escaped)})") if escaped else None


def _map_texts(
    value: Any,
    change: Callable[[str], str],
    change_id: Callable[[str], str],
    *,
    is_free: bool = False,
) -> Any:
    """Copy messages with every user-written text changed.

    `is_free`: keys have no meaning, as in the arguments of a call.
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
    """Keys of all objects within a value."""
    if isinstance(value, list):
        return [key for each in value for key in _keys(each)]
    if isinstance(value, dict):
        return [*value, *(key for each in value.values() for key in _keys(each))]
    return []


def _check_plain(value: Any, pattern: re.Pattern, name: str) -> None:
    """Raise InputError if a text or key in the value is, or contains, a control token's text."""
    if isinstance(value, str):
        if pattern.search(value):
            raise InputError(name, "contain the text of a control token", "change the text")
    elif isinstance(value, list):
        for each in value:
            _check_plain(each, pattern, name)
    elif isinstance(value, dict):
        _check_plain([*value, *value.values()], pattern, name)
