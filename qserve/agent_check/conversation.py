"""A conversation with tools, independent of the API that carries it."""

from dataclasses import dataclass, field
from typing import Any

AUTO, REQUIRED, NONE = "auto", "required", "none"  # other choices are names of tools


class CheckFailed(Exception):
    """A task failed; the text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call of an answer."""

    id: str
    name: str
    arguments: dict[str, Any] | None  # None: not a JSON object


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of the model, whole or joined from a stream."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    is_cut: bool = False  # at the token limit
    raw: Any = None  # in the API's form, to be sent back as history


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Output of a called tool."""

    call: Call
    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request: turns are texts of the user, answers, and lists of results."""

    turns: tuple[str | Answer | tuple[Result, ...], ...]
    tools: tuple[Tool, ...] = ()
    choice: str = AUTO
    is_parallel: bool = True
    max_tokens: int = 512
    system: str = "You are an assistant with tools."


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """A call while its parts arrive."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)


def expect(holds: object, reason: str) -> None:
    """Raise CheckFailed with the reason unless something holds."""
    if not holds:
        raise CheckFailed(reason)
