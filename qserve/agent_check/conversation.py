"""Data classes of a conversation with tools, independent of the API."""

from dataclasses import dataclass, field
from typing import Any

AUTO, REQUIRED, NONE = "auto", "required", "none"  # any other tool choice is a tool's name


class CheckFailed(Exception):
    """A task failed. The message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call in a reply."""

    id: str
    name: str
    arguments: dict[str, Any] | None  # None: not a JSON object


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply of the model, whole or joined from a stream."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    is_cut: bool = False  # True: cut at the token limit
    raw: Any = None  # the reply in the API's format, to send back as history


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Output of a called tool."""

    call: Call
    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request. Turns are user texts, replies of the model, and tuples of tool results."""

    turns: tuple[str | Answer | tuple[Result, ...], ...]
    tools: tuple[Tool, ...] = ()
    choice: str = AUTO
    is_parallel: bool = True
    max_tokens: int = 512
    system: str = "You are an assistant with tools."


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """A call in a stream, while its arguments arrive."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)


def expect(holds: object, reason: str) -> None:
    """Raise CheckFailed with the reason unless `holds` is true."""
    if not holds:
        raise CheckFailed(reason)
